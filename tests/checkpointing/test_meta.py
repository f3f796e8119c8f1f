"""Meta's folders, made from transformers' weights by index arithmetic written out here, come in as those weights."""

import json

import pytest
import torch

from megacp.checkpointing.huggingface import hugging_face_name
from megacp.checkpointing.meta import MetaWeights
from megacp.checkpointing.model_weights import PretrainedError
from tests.checkpointing.pretrained_models import DEFAULT, hugging_face_model

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 48, 8, 4, 2, 200  # 200: shards of the vocabulary are even
LAYER_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
COLUMNS = ("attention.wo", "feed_forward.w2")  # each shard holds a part of the columns


def _interleaved(weight, heads):
    """Row 2i of a head is row i of its first half, row 2i + 1 that of its second: one row at a time."""
    width = len(weight) // heads
    rows = []
    for head in range(heads):
        for i in range(width):
            rows.append(weight[head * width + (i // 2 if i % 2 == 0 else width // 2 + i // 2)])
    return torch.stack(rows)


def _meta_state(model):
    theirs = model.state_dict()
    state = {
        "tok_embeddings.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "output.weight": theirs["lm_head.weight"],
    }
    for layer in range(LAYERS):
        for name, meta in LAYER_NAMES.items():
            weight = theirs[f"model.layers.{layer}.{name}.weight"]
            heads = {"attention.wq": HEADS, "attention.wk": KV_HEADS}.get(meta)
            state[f"layers.{layer}.{meta}.weight"] = weight if heads is None else _interleaved(weight, heads)
    return state


def _save(directory, model, shards, params=(), embedding_columns=False):
    """Writes the folder as Meta does: parts of matrices, whole norms and frequencies in every file."""
    state = _meta_state(model)
    for number in range(shards):
        part = {"rope.freqs": torch.zeros(3)}
        for name, weight in state.items():
            columns = any(name.endswith(f"{end}.weight") for end in COLUMNS) or (embedding_columns and "tok_embeddings" in name)
            part[name] = (weight if weight.ndim == 1 else weight.chunk(shards, dim=int(columns))[number]).clone()
        torch.save(part, directory / f"consolidated.{number:02}.pth")
    values = dict(dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, multiple_of=16, norm_eps=1e-6, vocab_size=-1)
    (directory / "params.json").write_text(json.dumps(values | dict(params)))


def _model(**changes):
    return hugging_face_model("Llama", changes.pop("tied", False), DEFAULT, vocab_size=VOCABULARY, **changes)


@pytest.mark.parametrize("shards, embedding_columns", [(1, False), (2, True), (4, False)], ids=["one", "Llama 2", "Llama 3"])
def test_shards_are_joined_and_heads_reordered(tmp_path, shards, embedding_columns):
    model = _model(dtype=torch.bfloat16)
    _save(tmp_path, model, shards, embedding_columns=embedding_columns)
    weights, theirs = MetaWeights(tmp_path), dict(model.named_parameters())
    assert weights.config.vocab_size == VOCABULARY and weights.config.ffn_hidden_size == 80
    for name, info in weights.tensors.items():
        weight = weights.read(name)
        assert torch.equal(weight, theirs.pop(hugging_face_name(name))), name
        assert (tuple(weight.shape), weight.dtype) == (info.shape, info.dtype)
    assert not theirs


@pytest.mark.parametrize("params, tied, context, theta, factor", [
    ({}, False, 4096, 10000.0, None),
    ({"rope_theta": 500000.0}, False, 8192, 500000.0, None),
    ({"rope_theta": 500000.0, "use_scaled_rope": True}, False, 131072, 500000.0, 8.0),
    ({"rope_theta": 500000.0, "use_scaled_rope": True}, True, 131072, 500000.0, 32.0),
], ids=["2", "3", "3.1", "3.2"])  # fmt: skip
def test_what_params_json_leaves_out(tmp_path, params, tied, context, theta, factor):
    _save(tmp_path, _model(tied=tied), 2, params)
    weights = MetaWeights(tmp_path)
    config = weights.config
    assert (config.max_position_embeddings, config.rotary_base) == (context, theta)
    assert (config.rope_scaling and config.rope_scaling.factor) == factor
    assert config.untie_embeddings_and_output_weights is not tied and ("output_head.lm_head" in weights.tensors) is not tied
    assert any(f"{context:,}" in line for line in weights.assumptions)


def test_errors_name_file_and_setting(tmp_path):
    with pytest.raises(PretrainedError, match="has no consolidated.00.pth"):
        MetaWeights(tmp_path)
    _save(tmp_path, _model(), 2)
    (tmp_path / "consolidated.00.pth").rename(tmp_path / "moved")
    with pytest.raises(PretrainedError, match="consolidated.00.pth is missing, and consolidated.01.pth is there"):
        MetaWeights(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes((tmp_path / "moved").read_bytes()[:1000])
    with pytest.raises(PretrainedError, match="consolidated.00.pth is damaged, cut short"):
        MetaWeights(tmp_path)
    (tmp_path / "moved").rename(tmp_path / "consolidated.00.pth")
    _save(tmp_path, _model(), 2, {"moe_args": {"num_experts": 16}})
    with pytest.raises(PretrainedError, match='params.json: "moe_args": .* is not known here'):
        MetaWeights(tmp_path)
    _save(tmp_path, _model(), 2, {"n_kv_heads": 2})
    with pytest.raises(PretrainedError, match=r"tensor layers.0.attention.wk.weight is \[24, 48\], and \[12, 48\] by params.json"):
        MetaWeights(tmp_path)
