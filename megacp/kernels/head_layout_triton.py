"""The GPU kernels behind `head_layout`: one read of a head, one write to each place it goes, everything between in fp32 registers.

A row is one head of one token. A program takes the next `ROWS` rows of the GEMM-side matrix, `[t·G·n, D]`, each as two halves of
D/2 elements, the partners of the half-split RoPE. So the GEMM side is read (or written) in one run, the other side in runs of n·D.

Worked example: t = 8,192 tokens, G·n = 8 heads, D = 128 are 65,536 rows; 32 of them, 4,096 elements, make a program of 8 warps.

Row numbers and offsets are int64. Gradients of the norm's weight leave each program as one fp32 row and are summed afterwards: no
atomics, so the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_ELEMENTS = 4096  # elements of one program: 16 a thread at 8 warps
NUM_WARPS = 8
# Of the norm's way back, which holds more: measured on an H200, 8,192 tokens x 8 ranks x 4 heads of 128, 8 warps take 132 us and 4 take 93.
NUM_WARPS_NORM_BACK = 4


def pack_heads_triton(
    y_to: Tensor, send_CtnD: Tensor, copies: int, cos_sin: tuple[Tensor, Tensor] | None, norm_D: Tensor | None, eps: float
) -> None:
    """`pack_heads` for tensors that `serves` accepts, D even."""
    constants, grid = _plan(send_CtnD, copies, cos_sin, norm_D)
    cos, sin = _contiguous(cos_sin, y_to)
    _pack_kernel[grid](
        y_to.contiguous(), send_CtnD, cos, sin, y_to if norm_D is None else norm_D, _rows(send_CtnD, copies),
        *_strides(send_CtnD), eps, **constants,
    )  # fmt: skip


def unpack_heads_triton(
    dx_CtnD: Tensor, dy_tGnD: Tensor, copies: int, cos_sin: tuple[Tensor, Tensor] | None, y_to: Tensor | None,
    norm_D: Tensor | None, eps: float,
) -> Tensor | None:  # fmt: skip
    """`unpack_heads` into `dy_tGnD`, for tensors that `serves` accepts, D even; returns the gradient of the norm's weight, fp32."""
    constants, grid = _plan(dx_CtnD, copies, cos_sin, norm_D)
    cos, sin = _contiguous(cos_sin, dx_CtnD)
    normed = norm_D is not None
    if normed:
        constants["num_warps"] = NUM_WARPS_NORM_BACK
    partial_pD = dx_CtnD.new_empty(grid[0], dx_CtnD.shape[-1], dtype=torch.float32) if normed else None
    _unpack_kernel[grid](
        dx_CtnD, dy_tGnD, cos, sin, y_to.contiguous() if normed else dx_CtnD, norm_D if normed else dx_CtnD,
        partial_pD if normed else dx_CtnD, _rows(dx_CtnD, copies), *_strides(dx_CtnD), *_strides(dy_tGnD), eps, **constants,
    )  # fmt: skip
    return partial_pD.sum(0) if normed else None


def _rows(x_CtnD: Tensor, copies: int) -> int:
    ranks, tokens, heads, _ = x_CtnD.shape
    return ranks // copies * tokens * heads


def _plan(x_CtnD: Tensor, copies: int, cos_sin, norm_D) -> tuple[dict, tuple[int]]:
    """Compile-time constants and the grid."""
    ranks, _, heads, head_dim = x_CtnD.shape
    half = triton.next_power_of_2(head_dim // 2)
    rows = max(1, PROGRAM_ELEMENTS // (2 * half))
    constants = dict(
        HEADS=heads, GROUPS=ranks // copies, COPIES=copies, D=head_dim, HALF=half, ROWS=rows,
        ROTATE=cos_sin is not None, NORM=norm_D is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return constants, (triton.cdiv(_rows(x_CtnD, copies), rows),)


def _contiguous(cos_sin: tuple[Tensor, Tensor] | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin; without them any tensor, which the kernel does not touch."""
    return (unused, unused) if cos_sin is None else (cos_sin[0].contiguous(), cos_sin[1].contiguous())


def _strides(x: Tensor) -> tuple[int, int, int]:
    if x.stride(-1) != 1:
        raise ValueError(f"heads of shape {list(x.shape)} have stride {x.stride(-1)} inside a head; 1 is needed: .contiguous()")
    return x.stride()[:3]


@triton.jit
def _place(rows, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Of this program's rows, as columns: number, token, group, head in the group; then pairs and which elements exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    head = row % (GROUPS * HEADS)
    return row, row // (GROUPS * HEADS), head // HEADS, head % HEADS, pair, (row < rows) & (pair < D // 2)


@triton.jit
def _load_halves(pointers, live, D: tl.constexpr):
    first = tl.load(pointers, mask=live, other=0.0).to(tl.float32)
    return first, tl.load(pointers + D // 2, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(pointers, first, second, live, D: tl.constexpr):
    tl.store(pointers, first.to(pointers.dtype.element_ty), mask=live)
    tl.store(pointers + D // 2, second.to(pointers.dtype.element_ty), mask=live)


@triton.jit
def _reciprocal_rms(first, second, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]


@triton.jit
def _pack_kernel(
    y, send, cos, sin, norm, rows, send_block, send_token, send_head, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, token, group, head, pair, live = _place(rows, HEADS, GROUPS, D, HALF, ROWS)
    y1, y2 = _load_halves(y + row * D + pair, live, D)
    if NORM:
        w1, w2 = _load_halves(norm + pair, pair < D // 2, D)
        scale = _reciprocal_rms(y1, y2, eps, D)
        y1, y2 = y1 * scale * w1, y2 * scale * w2
    if ROTATE:
        c = tl.load(cos + token * (D // 2) + pair, mask=live, other=0.0)
        s = tl.load(sin + token * (D // 2) + pair, mask=live, other=0.0)
        y1, y2 = y1 * c - y2 * s, y2 * c + y1 * s
    for copy in tl.static_range(COPIES):
        block = group * COPIES + copy
        _store_halves(send + block * send_block + token * send_token + head * send_head + pair, y1, y2, live, D)


@triton.jit
def _unpack_kernel(
    dx, dy, cos, sin, y, norm, partial, rows, dx_block, dx_token, dx_head, dy_token, dy_group, dy_head, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, token, group, head, pair, live = _place(rows, HEADS, GROUPS, D, HALF, ROWS)
    place = dx + token * dx_token + head * dx_head + pair
    g1, g2 = _load_halves(place + group * COPIES * dx_block, live, D)
    for copy in tl.static_range(1, COPIES):
        more1, more2 = _load_halves(place + (group * COPIES + copy) * dx_block, live, D)
        g1 += more1
        g2 += more2
    if ROTATE:
        c = tl.load(cos + token * (D // 2) + pair, mask=live, other=0.0)
        s = tl.load(sin + token * (D // 2) + pair, mask=live, other=0.0)
        g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
    if NORM:
        w1, w2 = _load_halves(norm + pair, pair < D // 2, D)
        y1, y2 = _load_halves(y + row * D + pair, live, D)
        scale = _reciprocal_rms(y1, y2, eps, D)
        y1, y2 = tl.where(live, y1 * scale, 0.0), tl.where(live, y2 * scale, 0.0)  # rows that do not exist: 0 · inf when eps is 0
        sums = partial + tl.program_id(0).to(tl.int64) * D + tl.arange(0, HALF)
        _store_halves(sums, tl.sum(g1 * y1, 0), tl.sum(g2 * y2, 0), tl.arange(0, HALF) < D // 2, D)
        g1, g2 = g1 * w1, g2 * w2
        projection = (tl.sum(g1 * y1 + g2 * y2, 1) / D)[:, None]
        g1, g2 = (g1 - y1 * projection) * scale, (g2 - y2 * projection) * scale
    _store_halves(dy + token * dy_token + group * dy_group + head * dy_head + pair, g1, g2, live, D)
