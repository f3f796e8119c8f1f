"""A checkpoint of another model is refused with the parameter, both shapes and the flag to look at."""

import pytest

from megacp.checkpointing.compatibility import first_mismatch


def shapes(vocab=100, hidden=64, heads=8, kv_heads=2, head_dim=16, ffn=96, layers=2, qk_norm=False, untied=True):
    result = {"embedding.weight": (vocab, hidden)}
    for layer in range(layers):
        result |= {
            f"layers.{layer}.input_layernorm": (hidden,),
            f"layers.{layer}.q_proj": (heads * head_dim, hidden),
            f"layers.{layer}.k_proj": (kv_heads * head_dim, hidden),
            f"layers.{layer}.o_proj": (hidden, heads * head_dim),
            f"layers.{layer}.gate_proj": (ffn, hidden),
            f"layers.{layer}.down_proj": (hidden, ffn),
        }
        if qk_norm:
            result[f"layers.{layer}.q_norm"] = (head_dim,)
    result["output_head.norm"] = (hidden,)
    if untied:
        result["output_head.lm_head"] = (vocab, hidden)
    return result


def test_the_same_model_fits():
    assert first_mismatch(shapes(), shapes()) is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"vocab": 120}, ["embedding.weight", "(100, 64)", "(120, 64)", "look at --vocab-size"]),
        ({"hidden": 32}, ["embedding.weight", "(100, 64)", "(100, 32)", "look at --hidden-size"]),
        ({"heads": 4}, ["layers.0.q_proj", "(128, 64)", "(64, 64)", "--num-attention-heads, --kv-channels"]),
        ({"kv_heads": 4}, ["layers.0.k_proj", "(32, 64)", "(64, 64)", "--num-query-groups, --kv-channels"]),
        ({"ffn": 128}, ["layers.0.gate_proj", "(96, 64)", "(128, 64)", "look at --ffn-hidden-size"]),
        ({"layers": 3}, ["layers.2.input_layernorm", "not in the checkpoint", "--num-layers (2 saved, 3 asked for)"]),
        ({"layers": 1}, ["layers.1.input_layernorm", "not in the model", "--num-layers (2 saved, 1 asked for)"]),
        ({"qk_norm": True}, ["layers.0.q_norm", "not in the checkpoint", "--qk-layernorm"]),
        ({"untied": False}, ["output_head.lm_head", "not in the model", "--untie-embeddings-and-output-weights"]),
    ],
)
def test_each_difference_names_its_flag(change, parts):
    message = first_mismatch(shapes(), shapes(**change))
    for part in parts:
        assert part in message


def test_unknown_parameters_point_at_the_model():
    assert "--model" in first_mismatch({"a.bias": (2,)}, {"a.bias": (3,)})
    assert "--model" in first_mismatch({}, {"a.bias": (3,)})
