"""What a Llama or Qwen3 decoder is, written plainly: one process, dense masks, autograd, no tiles, no ranks.

The parity tests compare megacp with this. It shares nothing with megacp but the field names of a model's config, and is itself
compared with transformers in test_reference.py. It computes in the dtype of the weights it is given: float64 in the tests.

    loss_sum, logits_SV = reference_model(params, tokens_S, labels_S, position_ids_S, (0, 5, 16), config)

`params` maps names to tensors in Hugging Face's shapes: embedding.weight, layers.{i}.q_proj, ..., output_head.norm,
output_head.lm_head (absent when the embeddings are tied). `reference_layer` takes one layer's: input_layernorm, q_proj, ...
"""

import math

import torch

IGNORED_LABEL = -100


def reference_model(params, tokens_S, labels_S, position_ids_S, cu_seqlens, config):
    """Returns the sum of the losses of the labels that are not ignored, and the logits [S, V]."""
    embedding_Vd = params["embedding.weight"]
    h_Sd = embedding_Vd[tokens_S]
    for number in range(config.num_layers):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
        h_Sd = reference_layer(layer, h_Sd, position_ids_S, cu_seqlens, config)
    head_Vd = params["output_head.lm_head"] if config.untie_embeddings_and_output_weights else embedding_Vd
    logits_SV = _normalise(h_Sd, params["output_head.norm"], config.norm_epsilon) @ head_Vd.T
    kept_S = labels_S != IGNORED_LABEL
    log_probabilities_SV = logits_SV - torch.logsumexp(logits_SV, dim=-1, keepdim=True)
    loss_sum = -log_probabilities_SV[kept_S, labels_S[kept_S]].sum()
    return loss_sum, logits_SV


def reference_layer(params, h_Sd, position_ids_S, cu_seqlens, config):
    """One decoder layer over the whole stream; attention is causal and stays inside the documents of `cu_seqlens`."""
    x_Sd = _normalise(h_Sd, params["input_layernorm"], config.norm_epsilon)
    head_dim, kv_heads = config.kv_channels, config.num_query_groups
    q_SHD = (x_Sd @ params["q_proj"].T).reshape(len(h_Sd), config.num_attention_heads, head_dim)
    k_SKD = (x_Sd @ params["k_proj"].T).reshape(len(h_Sd), kv_heads, head_dim)
    v_SKD = (x_Sd @ params["v_proj"].T).reshape(len(h_Sd), kv_heads, head_dim)
    if config.qk_layernorm:
        q_SHD = _normalise(q_SHD, params["q_norm"], config.norm_epsilon)
        k_SKD = _normalise(k_SKD, params["k_norm"], config.norm_epsilon)
    turns_S1D2 = _turns(position_ids_S, config)
    q_SHD, k_SKD = _turn(q_SHD, turns_S1D2), _turn(k_SKD, turns_S1D2)
    forbidden_SS = ~_may_attend(len(h_Sd), cu_seqlens)
    heads = []
    for head in range(config.num_attention_heads):
        kv_head = head // (config.num_attention_heads // kv_heads)
        scores_SS = q_SHD[:, head] @ k_SKD[:, kv_head].T / math.sqrt(head_dim)
        heads.append(torch.softmax(scores_SS.masked_fill(forbidden_SS, -math.inf), dim=-1) @ v_SKD[:, kv_head])
    h_Sd = h_Sd + torch.cat(heads, dim=-1) @ params["o_proj"].T
    y_Sd = _normalise(h_Sd, params["post_attention_layernorm"], config.norm_epsilon)
    gate_SF, up_SF = y_Sd @ params["gate_proj"].T, y_Sd @ params["up_proj"].T
    return h_Sd + (gate_SF * torch.sigmoid(gate_SF) * up_SF) @ params["down_proj"].T


def _normalise(x, weight, epsilon):
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + epsilon)


def _may_attend(length, cu_seqlens):
    """[S, S], true where the row's token sees the column's: same document, not later."""
    document_S = torch.zeros(length, dtype=torch.int64)
    for border in cu_seqlens[1:-1]:
        document_S[border:] += 1
    return (document_S[:, None] == document_S[None, :]) & torch.ones(length, length, dtype=torch.bool).tril()


def _turn(x_SHD, turns_S1D2):
    """Rotary position: (x[i], x[i + D/2]) as one complex number, times e^(i angle)."""
    half = x_SHD.shape[-1] // 2
    turned = torch.complex(x_SHD[..., :half], x_SHD[..., half:]) * turns_S1D2
    return torch.cat([turned.real, turned.imag], dim=-1)


def _turns(position_ids_S, config):
    """The complex number that each pair of each token is multiplied by, [S, 1, D/2]."""
    frequencies, magnitude = _frequencies(config)
    angles = position_ids_S[:, None, None].double() * torch.tensor(frequencies, dtype=torch.float64)
    return torch.polar(torch.full_like(angles, magnitude), angles)


def _frequencies(config):
    """Radians per token of each pair, and what the turned vectors are multiplied by (YaRN; else 1)."""
    head_dim, base, scaling = config.kv_channels, config.rotary_base, config.rope_scaling
    plain = [base ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_position_embeddings
    if scaling.type == "llama3":
        scaled = []
        for frequency in plain:
            wavelength = 2 * math.pi / frequency
            if wavelength < original / scaling.high_freq_factor:
                scaled.append(frequency)
            elif wavelength > original / scaling.low_freq_factor:
                scaled.append(frequency / scaling.factor)
            else:
                smooth = original / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                scaled.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
        return scaled, 1.0
    assert scaling.type == "yarn", scaling.type

    def pair_turning(times):
        """The (fractional) pair that turns `times` times over the original context."""
        return head_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(base))

    first = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_turning(scaling.beta_slow)), head_dim - 1)
    scaled = []
    for pair, frequency in enumerate(plain):
        slowed = min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
        scaled.append(slowed * frequency / scaling.factor + (1 - slowed) * frequency)
    magnitude = scaling.attention_factor
    return scaled, 0.1 * math.log(scaling.factor) + 1 if magnitude is None else magnitude


def random_parameters(config, std, seed):
    """Float64 weights for every name of `reference_model`: norms near 1, the rest normal with standard deviation `std`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return std * torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, ffn, head_dim = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head_dim, config.num_query_groups * head_dim
    params = {"embedding.weight": normal(config.vocab_size, hidden)}
    for number in range(config.num_layers):
        layer = {
            "input_layernorm": 1 + normal(hidden), "post_attention_layernorm": 1 + normal(hidden),
            "q_proj": normal(queries, hidden), "k_proj": normal(keys, hidden), "v_proj": normal(keys, hidden),
            "o_proj": normal(hidden, queries), "gate_proj": normal(ffn, hidden), "up_proj": normal(ffn, hidden),
            "down_proj": normal(hidden, ffn),
        }  # fmt: skip
        if config.qk_layernorm:
            layer |= {"q_norm": 1 + normal(head_dim), "k_norm": 1 + normal(head_dim)}
        params |= {f"layers.{number}.{name}": value for name, value in layer.items()}
    params["output_head.norm"] = 1 + normal(hidden)
    if config.untie_embeddings_and_output_weights:
        params["output_head.lm_head"] = normal(config.vocab_size, hidden)
    return params
