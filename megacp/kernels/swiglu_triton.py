"""SwiGLU and its backward in Triton, in place, each one pass over its tensors; `swiglu.py` has the formulas.

Worked example, a tile [8192, 14336] in bf16: programs of 1,024 columns of one row, 8192 x 14 of them. Forward reads gate and up and
writes z, 672 MiB in all; backward reads dz, gate and up and writes z, dgate and dup in their places, 1,344 MiB.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 1024  # of one row, for a program of NUM_WARPS warps: 16 bytes of bf16 a thread and tensor
NUM_WARPS = 4


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptrs = gate_ptr + row * gate_stride + column
    gate = tl.load(gate_ptrs, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside).to(tl.float32)
    tl.store(gate_ptrs, (gate * tl.sigmoid(gate) * up).to(gate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(dz_ptr, gate_ptr, up_ptr, dz_stride, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dz_ptrs = dz_ptr + row * dz_stride + column
    gate_ptrs = gate_ptr + row * gate_stride + column
    up_ptrs = up_ptr + row * up_stride + column
    dz = tl.load(dz_ptrs, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=inside).to(tl.float32)
    up = tl.load(up_ptrs, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activation = gate * sigmoid
    dgate = (sigmoid + activation * (1 - sigmoid)) * up * dz
    tl.store(dz_ptrs, (activation * up).to(dz_ptr.dtype.element_ty), mask=inside)
    tl.store(gate_ptrs, dgate.to(gate_ptr.dtype.element_ty), mask=inside)
    tl.store(up_ptrs, (activation * dz).to(up_ptr.dtype.element_ty), mask=inside)


def swiglu_triton_(gate_tF: Tensor, up_tF: Tensor) -> Tensor:
    """As `swiglu_`, for matrices of contiguous rows."""
    with torch.cuda.device_of(gate_tF):
        _forward_kernel[_grid(gate_tF)](
            gate_tF, up_tF, gate_tF.stride(0), up_tF.stride(0), gate_tF.shape[1], BLOCK=BLOCK_COLUMNS, num_warps=NUM_WARPS
        )
    return gate_tF


def swiglu_backward_triton_(dz_tF: Tensor, gate_tF: Tensor, up_tF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `swiglu_backward_`, for matrices of contiguous rows."""
    with torch.cuda.device_of(gate_tF):
        _backward_kernel[_grid(gate_tF)](
            dz_tF, gate_tF, up_tF, dz_tF.stride(0), gate_tF.stride(0), up_tF.stride(0), gate_tF.shape[1],
            BLOCK=BLOCK_COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
    return gate_tF, up_tF, dz_tF


def _grid(x_tF: Tensor) -> tuple[int, int]:
    """One row by one block of columns a program; a GPU takes 2^31 - 1 by 65,535 programs."""
    return x_tF.shape[0], triton.cdiv(x_tF.shape[1], BLOCK_COLUMNS)
