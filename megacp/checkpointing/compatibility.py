"""Whether a saved model fits the one built, and which flag makes the difference.

    first_mismatch({"layers.0.k_proj": (256, 512)}, {"layers.0.k_proj": (512, 512)})
    "layers.0.k_proj is (256, 512) in the checkpoint and (512, 512) in the model built from the flags: look at
     --num-query-groups, --kv-channels"
"""

import re
from collections.abc import Mapping

Shape = tuple[int, ...]

HIDDEN = "--hidden-size"
Q_ROWS = "--num-attention-heads, --kv-channels"
KV_ROWS = "--num-query-groups, --kv-channels"
FFN = "--ffn-hidden-size"
# Flag behind each dimension, by the last part of the parameter's name.
FLAGS_BY_DIMENSION = {
    "weight": ("--vocab-size", HIDDEN),  # of the embedding
    "lm_head": ("--vocab-size", HIDDEN),
    "q_proj": (Q_ROWS, HIDDEN),
    "k_proj": (KV_ROWS, HIDDEN),
    "v_proj": (KV_ROWS, HIDDEN),
    "o_proj": (HIDDEN, Q_ROWS),
    "gate_proj": (FFN, HIDDEN),
    "up_proj": (FFN, HIDDEN),
    "down_proj": (HIDDEN, FFN),
    "q_norm": ("--kv-channels",),
    "k_norm": ("--kv-channels",),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "norm": (HIDDEN,),
}
FLAG_BEHIND_PRESENCE = {
    "q_norm": "--qk-layernorm",
    "k_norm": "--qk-layernorm",
    "lm_head": "--untie-embeddings-and-output-weights",
}


def first_mismatch(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str | None:
    """Says what is wrong with the first parameter that differs, in the model's order; None if all fit."""
    layers = _layers(saved), _layers(wanted)
    for name, shape in wanted.items():
        if name not in saved:
            flag = _flag_behind_presence(name, *layers)
            return f"{name} {shape} is not in the checkpoint; look at {flag}"
        if saved[name] != shape:
            return (
                f"{name} is {saved[name]} in the checkpoint and {shape} in the model built from the flags: "
                f"look at {_flag_behind_shape(name, saved[name], shape)}"
            )
    for name, shape in saved.items():
        if name not in wanted:
            flag = _flag_behind_presence(name, *layers)
            return f"{name} {shape} of the checkpoint is not in the model; look at {flag}"
    return None


def _flag_behind_shape(name: str, saved: Shape, wanted: Shape) -> str:
    flags = FLAGS_BY_DIMENSION.get(name.rsplit(".", 1)[-1])
    if flags is None or not len(flags) == len(saved) == len(wanted):
        return "--model"
    return ", ".join(flag for flag, before, now in zip(flags, saved, wanted, strict=True) if before != now)


def _flag_behind_presence(name: str, saved_layers: int, wanted_layers: int) -> str:
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= min(saved_layers, wanted_layers):
        return f"--num-layers ({saved_layers} saved, {wanted_layers} asked for)"
    return FLAG_BEHIND_PRESENCE.get(name.rsplit(".", 1)[-1], "--model")


def _layers(names: Mapping[str, Shape]) -> int:
    return 1 + max((int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))), default=-1)
