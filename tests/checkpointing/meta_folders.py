"""Folders as Meta distributes them, made from transformers' weights by index arithmetic of their own.

    save_as_meta(directory, meta_model(), shards=2)      # params.json, consolidated.00.pth, consolidated.01.pth
"""

import json

import torch

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


def save_as_meta(directory, model, shards, params=(), embedding_columns=False):
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


def meta_model(**changes):
    return hugging_face_model("Llama", changes.pop("tied", False), DEFAULT, vocab_size=VOCABULARY, **changes)
