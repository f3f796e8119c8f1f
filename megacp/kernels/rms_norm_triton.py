"""RMSNorm and its backward in Triton, each reading its inputs and writing its result once; `rms_norm.py` has the formulas.

    y = w x r,   r = 1 / sqrt(mean(x^2) + eps)
    dx = r (a - x' mean(a x')) + residual,   a = dy w,   x' = x r,   dweight = sum over rows of dy x'

Worked example, x [8192, 4096] in bf16. Forward: one program a row, 64 MiB read and 64 MiB written. Backward on 132 processors: 264
programs, of which number 5 takes rows 5, 269, 533, ... and keeps the sum of dy x' of its rows in registers; the 264 sums,
`[264, 4096]` in fp32 (4 MiB), are then added. No atomic addition: the same input gives the same bits.

Narrow rows, such as the 128 elements of a head, are handled several at a time as a block `[ROWS, COLUMNS]`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacp.kernels.triton_support import processors

BLOCK_ELEMENTS = 4096  # of the rows that a program handles at a time, at least one row
ELEMENTS_PER_WARP = 1024  # of a block: 32 a thread, and in backward 16, where five blocks are in registers at once
PROGRAMS_PER_PROCESSOR = 2  # in backward; each adds a row of fp32 to the traffic


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(x_ptr, weight_ptr, y_ptr, rows, x_stride, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    tl.store(y_ptr + row * width + column, (x * r * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, residual_ptr, dx_ptr, partial_ptr,
    rows, dy_stride, x_stride, residual_stride, dx_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        a = dy * weight
        r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
        normed = x * r
        dx = (a - normed * (tl.sum(a * x, axis=1, keep_dims=True) / width * r)) * r
        dweight += dy * normed
        if HAS_RESIDUAL:
            dx += residual
        tl.store(dx_ptr + row * dx_stride + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    total = tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(partial_ptr + program.to(tl.int64) * width + column, total, mask=column < width)


def rms_norm_triton(x_Td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, for x of contiguous rows of at most MAX_TRITON_WIDTH elements."""
    x, width = x_Td.view(-1, x_Td.shape[-1]), x_Td.shape[-1]
    y_Td = torch.empty_like(x_Td, memory_format=torch.contiguous_format)
    block_rows, columns = _block(len(x), width)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(len(x), block_rows),)](
            x, weight_d, y_Td, len(x), x.stride(0), width, eps,
            ROWS=block_rows, COLUMNS=columns, num_warps=_warps(block_rows * columns, ELEMENTS_PER_WARP),
        )  # fmt: skip
    return y_Td


def rms_norm_backward_triton(
    dy_Td: Tensor, x_Td: Tensor, weight_d: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `rms_norm_backward`, for tensors of contiguous rows of at most MAX_TRITON_WIDTH elements."""
    dx_Td = torch.empty_like(x_Td, memory_format=torch.contiguous_format) if out is None else out
    width = x_Td.shape[-1]
    dy, x, dx = (tensor.view(-1, width) for tensor in (dy_Td, x_Td, dx_Td))
    added = dx if residual is None else residual.view(-1, width)
    block_rows, columns = _block(len(x), width)
    programs = min(triton.cdiv(len(x), block_rows), PROGRAMS_PER_PROCESSOR * processors(x))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward_kernel[(programs,)](
            dy, x, weight_d, added, dx, partial,
            len(x), dy.stride(0), x.stride(0), added.stride(0), dx.stride(0), width, eps,
            HAS_RESIDUAL=residual is not None, ROWS=block_rows, COLUMNS=columns, STAGES=_stages(width),
            num_warps=_warps(block_rows * columns, ELEMENTS_PER_WARP // 2),
        )  # fmt: skip
    return dx_Td, partial.sum(0)


def _stages(width: int) -> int:
    """Loads of the backward that run ahead of the arithmetic.

    Measured on an H200, 8,192 rows in bf16 with a residual, share of a device copy's rate with 1, 2 and 3: width 4,096 70%, 54%, 61%;
    5,120 50%, 46%, 68%; 8,192 65%, 64%, 86%. Three of 16,384 would not fit in shared memory.
    """
    return 3 if 4096 < width <= 8192 else 1


def _block(rows: int, width: int) -> tuple[int, int]:
    """Rows and columns of the block that a program handles at a time, powers of two.

    >>> _block(8192, 4096), _block(8192, 5120), _block(1_000_000, 128), _block(3, 128)
    ((1, 4096), (1, 8192), (32, 128), (4, 128))
    """
    columns = triton.next_power_of_2(width)
    return min(max(1, BLOCK_ELEMENTS // columns), triton.next_power_of_2(rows)), columns


def _warps(elements: int, elements_per_warp: int) -> int:
    return min(max(1, elements // elements_per_warp), 32)
