"""cos and sin of a tile's RoPE angles in one kernel: float64 in registers, fp32 in memory.

In plain torch they are eight passes over float64 tensors, which every tile of every stage makes anew in forward and backward.
"""

import triton
import triton.language as tl
from torch import Tensor

PROGRAM_ELEMENTS = 1024


def rotary_cos_sin_triton(position_ids_T: Tensor, inv_freq: Tensor, cos_tD2: Tensor, sin_tD2: Tensor, factor: float) -> None:
    """Fills cos and sin, contiguous fp32 `[t, D/2]`, as `rotary_cos_sin` defines them."""
    tokens, half = cos_tD2.shape
    width = triton.next_power_of_2(half)
    rows = max(1, PROGRAM_ELEMENTS // width)
    _cos_sin_kernel[(triton.cdiv(tokens, rows),)](
        position_ids_T, inv_freq, cos_tD2, sin_tD2, tokens, position_ids_T.stride(0),
        FACTOR=factor, HALF=half, WIDTH=width, ROWS=rows,
    )  # fmt: skip


@triton.jit
def _cos_sin_kernel(
    positions, frequencies, cos, sin, tokens, stride,
    FACTOR: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, WIDTH)[None, :]
    live = (token < tokens) & (pair < HALF)
    position = tl.load(positions + token * stride, mask=token < tokens, other=0).to(tl.float64)
    angle = position * tl.load(frequencies + pair, mask=pair < HALF, other=0.0)
    place = token * HALF + pair
    # FACTOR is a constant, as a number given at run time would be rounded to fp32.
    tl.store(cos + place, (tl.cos(angle) * FACTOR).to(tl.float32), mask=live)
    tl.store(sin + place, (tl.sin(angle) * FACTOR).to(tl.float32), mask=live)
