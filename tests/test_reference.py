"""The reference of the parity tests against transformers: Llama and Qwen3, outputs, loss and every weight gradient.

At a standard deviation of 0.02 and a few tokens a dropped RoPE scaling changes logits by 1e-4; hence 0.2 and 320 tokens.
transformers rounds cos and sin to fp32 whatever the model's dtype, so it agrees to some 1e-6, not to float64.
"""

import pytest
import torch

from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig
from tests.reference import IGNORED_LABEL, random_parameters, reference_model

transformers = pytest.importorskip("transformers")

TOKENS = 320
HF_LAYER_NAMES = dict(
    q_proj="self_attn.q_proj", k_proj="self_attn.k_proj", v_proj="self_attn.v_proj", o_proj="self_attn.o_proj",
    q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", gate_proj="mlp.gate_proj", up_proj="mlp.up_proj",
    down_proj="mlp.down_proj",
)  # fmt: skip
LLAMA3 = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 64, beta_fast=32.0, beta_slow=1.0)


def _config(**changes):
    fields = dict(
        name="test", num_layers=2, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2,
        kv_channels=16, vocab_size=97, max_position_embeddings=512, rotary_base=10000.0, rope_scaling=None,
        norm_epsilon=1e-5, qk_layernorm=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    return ModelConfig(**(fields | changes))


def _hugging_face_model(config):
    rope = {"rope_type": "default", "rope_theta": config.rotary_base}
    scaling = config.rope_scaling
    if scaling is not None:
        rope |= dict(
            rope_type=scaling.type, factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )  # fmt: skip
        rope |= (
            dict(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor)
            if scaling.type == "llama3"
            else dict(beta_fast=scaling.beta_fast, beta_slow=scaling.beta_slow)
        )
    family = "Qwen3" if config.qk_layernorm else "Llama"
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups, head_dim=config.kv_channels, rms_norm_eps=config.norm_epsilon,
        max_position_embeddings=config.max_position_embeddings, attn_implementation="eager", rope_theta=config.rotary_base,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights, rope_scaling=rope, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(hf_config).double()


def _hugging_face_name(name):
    if name.startswith("layers."):
        _, number, leaf = name.split(".")
        return f"model.layers.{number}.{HF_LAYER_NAMES.get(leaf, leaf)}.weight"
    return {"embedding.weight": "model.embed_tokens.weight", "output_head.norm": "model.norm.weight",
            "output_head.lm_head": "lm_head.weight"}[name]  # fmt: skip


def _relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("cu_seqlens", [(0, TOKENS), (0, 1, 130, 131, TOKENS)], ids=["one document", "four documents"])
@pytest.mark.parametrize(
    "config",
    [
        _config(),
        _config(rope_scaling=LLAMA3, untie_embeddings_and_output_weights=False),
        _config(rope_scaling=YARN),
        _config(qk_layernorm=True, num_query_groups=6, norm_epsilon=1e-6),
    ],
    ids=["llama", "llama3 scaling, tied", "yarn", "qwen3"],
)
def test_reference_matches_transformers(config, cu_seqlens):
    params = {name: value.requires_grad_() for name, value in random_parameters(config, std=0.2, seed=5).items()}
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=generator)
    labels = torch.randint(config.vocab_size, (TOKENS,), generator=generator)
    labels[::3] = IGNORED_LABEL
    position_ids = torch.arange(TOKENS)
    for start, stop in zip(cu_seqlens, cu_seqlens[1:]):
        position_ids[start:stop] -= start

    model = _hugging_face_model(config)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            theirs.pop(_hugging_face_name(name)).copy_(value)
    assert not theirs, "weights of transformers' model that the reference has no name for"
    mask_SS = torch.full((TOKENS, TOKENS), torch.finfo(torch.float64).min, dtype=torch.float64)
    for start, stop in zip(cu_seqlens, cu_seqlens[1:]):
        mask_SS[start:stop, start:stop].triu_(1)
    logits_SV = model(tokens[None], attention_mask=mask_SS[None, None], position_ids=position_ids[None]).logits[0]
    loss_sum = torch.nn.functional.cross_entropy(logits_SV, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    loss_sum.backward()

    reference_loss_sum, reference_logits_SV = reference_model(params, tokens, labels, position_ids, cu_seqlens, config)
    reference_loss_sum.backward()
    assert _relative(reference_logits_SV.detach(), logits_SV.detach()) < 1e-5
    assert reference_loss_sum.item() == pytest.approx(loss_sum.item(), rel=1e-6)
    theirs = dict(model.named_parameters())
    for name, value in params.items():
        assert _relative(value.grad, theirs[_hugging_face_name(name)].grad) < 2e-5, name
