"""What a layer's allocations are called in a prediction, told by the place in the code that makes them.

    with AllocationCounter("meta", name=buffer_name) as counter:
        layer(h_Td, context)
    counter.peak_holders()                  # {"k, v": 1073741824, "q": 536870912, "projection tile": …}

A place is (file, function, result): `q = _begin(…)` in `begin` of engine.py makes "q"; result None is any other statement of the
function. Looked for from the innermost function outward, so that what a helper allocates belongs to its caller. What no place names
is called after its function: a new buffer shows up under that name, and the sum stays whole.
"""

from functools import lru_cache
from pathlib import Path
from types import FrameType

from megacp.memory.allocation_sites import package_frames, result_name
from megacp.planning import work

KEPT = "kept activations"
HIDDEN, RESIDUAL, WEIGHT_GRADIENTS = "hidden state", "residual gradient", "weight gradients"
_TILE = "projection tile"
_PLACES = {
    "planner": {
        ("run_layer", "h"): HIDDEN, ("run_layer", "g"): RESIDUAL,
        ("run_head", "h"): HIDDEN, ("run_head", "labels"): "labels",
    },
    "decoder_layer": {
        ("forward", "h_out"): HIDDEN, ("backward", "grads"): WEIGHT_GRADIENTS, ("backward", "dxn"): "dxn",
        ("_gather_heads", None): "output projection tile", ("forward", "h_mid"): "output projection tile",
        ("backward", "_mlp_backward_"): "output projection tile",  # its argument, h_mid made again
        ("_mlp_forward", None): "MLP tile", ("_mlp_backward_", None): "MLP tile",
    },
    "attention_projections": {
        ("_packing", "q"): "q send", ("_packing", "k, v"): "k, v send", ("pack_do", "do"): "do send",
        **{(name, None): _TILE for name in (
            "pack_q", "pack_kv", "pack_do", "take_dq", "take_dkv", "_packing", "_taking", "_run", "_normed_tiles", "close",
        )},
    },
    "engine": {
        ("begin", "q"): "q", ("begin", "kv"): "k, v", ("begin", "do"): "do", ("begin", "o"): "o", ("begin", "output"): "o",
        ("begin", "lse"): "lse",
        ("stages_forward", "o"): "o", ("stages_forward", "lse"): "lse",
        ("stages_backward", "lse"): "lse", ("stages_backward", "dq"): "dq", ("stages_backward", "dk, dv"): "dk, dv",
        ("_put", None): "o", ("_attend", None): "o",
        ("_attend_backward", None): "dq", ("_attend_backward", "kv_grads"): "dk, dv sums",
    },
    "stub": {
        ("_forward", "o"): "o", ("_forward", "lse"): "lse", ("_backward", "dq"): "dq", ("_backward", "dk, dv"): "dk, dv",
        ("workspace", None): "attention workspace",
    },
    "calls": {("_one_head", None): "attention copies of a head", ("backward_in_calls", "dq, dk, dv"): "dq, dk, dv",
              ("forward_in_calls", None): "o", ("backward_in_calls", None): "attention workspace"},
    "shelves": {("next", None): "staging of copies"},
    "weight_gradient": {("matrix_total", None): WEIGHT_GRADIENTS},
    "output_head": {("forward", "dh"): "gradient of the hidden state", ("forward", "dnorm, dweight"): WEIGHT_GRADIENTS,
                    ("forward", None): "logits tile"},
}  # fmt: skip


def buffer_name(frame: FrameType) -> str:
    """The name of what is allocated in `frame`."""
    fallback = None
    for place in package_frames(frame):
        function, file = place.f_code.co_name, place.f_code.co_filename
        if file == work.__file__:
            continue  # it hands on what it counts
        names = _places_of(file)
        name = names.get((function, result_name(place))) or names.get((function, None))
        if name:
            return name
        fallback = fallback or function.strip("_<>").replace("_", " ")
    return fallback or "other"


@lru_cache
def _places_of(file: str) -> dict[tuple[str, str | None], str]:
    return _PLACES.get(Path(file).stem, {})
