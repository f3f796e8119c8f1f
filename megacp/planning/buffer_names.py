"""What a layer's allocations are called in a prediction, told by the place in the code that makes them.

    with AllocationCounter("meta", name=buffer_name) as counter:
        layer(h_Td, context)
    counter.peak_holders()                  # {"k, v": 1073741824, "q": 536870912, "projection tile": …}

A place is (file, function, result): `q_XnD = _exchange_to_heads(…)` in `stages_backward` of engine.py makes "q"; result None is any
other statement of the function. Looked for from the innermost function outward, so that what a helper allocates belongs to its
caller. What no place names is called after its function: a new buffer shows up under that name, and the sum stays whole.
"""

from functools import lru_cache
from pathlib import Path
from types import FrameType

from megacp.memory.allocation_sites import package_frames, result_name

KEPT = "kept activations"
HIDDEN, RESIDUAL, WEIGHT_GRADIENTS = "hidden state", "residual gradient", "weight gradients"
_TILE = "projection tile"
_PLACES = {
    "planner": {
        ("run_layer", "h"): HIDDEN, ("run_layer", "g"): RESIDUAL, ("run_layer", "out.backward"): "weight gradients handed over",
        ("run_head", "h"): HIDDEN, ("run_head", "labels"): "labels",
    },
    "decoder_layer": {
        ("forward", "h_out"): HIDDEN, ("forward", None): "output projection tile", ("_gather_heads", None): "output projection tile",
        ("backward", "grads"): WEIGHT_GRADIENTS, ("backward", "g"): RESIDUAL, ("backward", "dxn"): "dxn",
        ("backward", None): "output projection tile",
        ("_mlp_forward", None): "MLP tile", ("_mlp_backward_", None): "MLP tile",
    },
    "attention_projections": {
        ("_packing", "q"): "q send", ("_packing", "k, v"): "k, v send", ("pack_do", "do"): "do send",
        **{(name, None): _TILE for name in (
            "pack_q", "pack_kv", "pack_do", "take_dq", "take_dkv", "_packing", "_taking", "_run", "_normed_tiles", "close",
        )},
    },
    "engine": {
        **{(stages, result): name for stages in ("stages_forward", "stages_backward", "begin") for result, name in (
            ("q", "q"), ("kv", "k, v"), ("do", "do"), ("o", "o"), ("output", "o"), ("outputs.put", "o"), ("o, lse", "o"), ("dq", "dq"),
            ("dk, dv", "dk, dv"),
            ("lse", "lse"), ("lse_parts", "lse"), ("log_sum_exps.put", "lse"),
        )},
        **{(stages, None): "attention" for stages in ("stages_forward", "stages_backward", "begin")},
        ("_put", None): "o", ("_attend", None): "o", ("_attend_backward", None): "dq", ("_attend_backward", "kv_grads"): "dk, dv sums",
    },
    "stub": {
        ("_forward", "o"): "o", ("_forward", "lse"): "lse", ("_backward", "dq"): "dq", ("_backward", "dk, dv"): "dk, dv",
        ("workspace", None): "attention workspace",
    },
    "calls": {("_one_head", None): "attention copies of a head", ("backward_in_calls", "dq, dk, dv"): "dq, dk, dv",
              ("forward_in_calls", None): "o", ("backward_in_calls", None): "attention workspace"},
    "shelves": {("next", None): "staging of copies"},
    "weight_gradient": {("accumulate_weight_gradient", None): "weight gradient of a tile", ("matrix_total", None): WEIGHT_GRADIENTS},
    "output_head": {("forward", "dh"): "gradient of the hidden state", ("forward", "dnorm, dweight"): WEIGHT_GRADIENTS,
                    ("forward", None): "logits tile"},
}  # fmt: skip


def buffer_name(frame: FrameType) -> str:
    """The name of what is allocated in `frame`."""
    fallback = None
    for place in package_frames(frame):
        function = place.f_code.co_name
        fallback = fallback or function.strip("_<>").replace("_", " ")
        names = _places_of(place.f_code.co_filename)
        name = names.get((function, result_name(place))) or names.get((function, None))
        if name:
            return name
    return fallback or "other"


@lru_cache
def _places_of(file: str) -> dict[tuple[str, str | None], str]:
    return _PLACES.get(Path(file).stem, {})
