"""Heads between a projection's output and the all-to-all layout: q/k norm, RoPE and the move to the blocks of the ranks, and back.

    y_to [t, G·n·D]   ──pack_heads──▶    send_CtnD [C, t, n, D]       a GEMM's rows → block r for rank r
    dy_to [t, G·n·D]  ◀─unpack_heads──   dx_CtnD   [C, t, n, D]       the transpose, for gradients that came back

Worked example, C = 4 ranks, K = 2 KV heads, D = 128, one new KV head a rank: the key projection of a tile of 8,192 tokens is
`[8192, 2·1·128]`, G = 2 groups of one head. Each head is normalised (Qwen3), turned by the angle of its token and written to
`copies` = 2 blocks: head 0 to ranks 0 and 1, head 1 to ranks 2 and 3. On the way back the gradients of blocks 0 and 1 are summed.

Without `cos_sin` nothing is turned (values, the gradient of the attention output), without `norm_D` nothing is normalised, and with
neither the functions move heads only. The tile of the send buffer is a view, so nothing is written twice; one read of the input and
one write of the result on a GPU (`head_layout_triton`).

Statistics and sums are fp32 (float64 for float64 inputs). The GPU kernel keeps fp32 from its read to its write and rounds once; the
reference here rounds after the norm and after RoPE.

Letters: C ranks of the Ulysses group, G = C / copies groups of heads, t tokens, n heads of a group, D head dim, o = G·n·D.
"""

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.rotary import apply_rotary
from megacp.kernels.triton_support import is_predicted, serves

MAX_KERNEL_HEAD_DIM = 256  # a head must fit the registers of its threads

CosSin = tuple[Tensor, Tensor]  # cos_tD2, sin_tD2 as `rotary_cos_sin` makes them


def pack_heads(
    y_to: Tensor, send_CtnD: Tensor, copies: int, cos_sin: CosSin | None = None, norm_D: Tensor | None = None, eps: float = 0.0
) -> None:
    """Writes the heads of y_to, contiguous, to their blocks of `send_CtnD`, any view whose last stride is 1.

    Head j of group g goes to the blocks `[g·copies, (g+1)·copies)`, slot j.
    """
    ranks, tokens, heads, head_dim = send_CtnD.shape
    _check("y", y_to, (tokens, ranks // copies * heads * head_dim))
    if is_predicted(y_to):
        return
    if _kernel_serves(head_dim, cos_sin, y_to, send_CtnD, norm_D):
        from megacp.kernels.head_layout_triton import pack_heads_triton

        pack_heads_triton(y_to, send_CtnD, copies, cos_sin, norm_D, eps)
        return
    y_thD = y_to.unflatten(1, (-1, head_dim))
    if norm_D is not None:
        y_thD = rms_norm(y_thD, norm_D, eps)
    if cos_sin is not None:
        y_thD = apply_rotary(y_thD, *cos_sin)
    send_GctnD = send_CtnD.unflatten(0, (-1, copies))
    send_GctnD.copy_(y_thD.unflatten(1, (-1, heads)).transpose(0, 1).unsqueeze(1))


def unpack_heads(
    dx_CtnD: Tensor, copies: int, cos_sin: CosSin | None = None, y_to: Tensor | None = None, norm_D: Tensor | None = None,
    eps: float = 0.0, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The transpose of `pack_heads`: gradients `(dy_to, dnorm_D)` of what it was given; dnorm_D in fp32, None without a norm.

    `dx_CtnD` is any view whose last stride is 1. With a norm, `y_to` is what `pack_heads` was given, not yet normalised. dy_to is
    new and contiguous, or it is written to `out`, `[t, G, n, D]`, any view whose last stride is 1, which is returned.
    """
    ranks, tokens, heads, head_dim = dx_CtnD.shape
    shape = (tokens, ranks // copies, heads, head_dim)
    dy_tGnD = dx_CtnD.new_empty(shape) if out is None else out
    _check("out", dy_tGnD, shape)
    if norm_D is not None:
        _check("y", y_to, (tokens, ranks // copies * heads * head_dim))
    if is_predicted(dx_CtnD):
        dnorm_D = None if norm_D is None else torch.empty_like(norm_D, dtype=torch.float32)
    elif _kernel_serves(head_dim, cos_sin, dx_CtnD, dy_tGnD, y_to, norm_D):
        from megacp.kernels.head_layout_triton import unpack_heads_triton

        dnorm_D = unpack_heads_triton(dx_CtnD, dy_tGnD, copies, cos_sin, y_to, norm_D, eps)
    else:
        dy_GtnD, dnorm_D = _sum_copies(dx_CtnD, copies), None
        if cos_sin is not None:
            dy_GtnD = apply_rotary(dy_GtnD, *cos_sin, inverse=True)
        if norm_D is not None:
            y_GtnD = y_to.view(shape).transpose(0, 1)
            dy_GtnD, dnorm_D = rms_norm_backward(dy_GtnD, y_GtnD, norm_D, eps)
        dy_tGnD.copy_(dy_GtnD.transpose(0, 1))
    return (dy_tGnD.flatten(1) if out is None else out), dnorm_D


def _sum_copies(dx_CtnD: Tensor, copies: int) -> Tensor:
    """`[C, t, n, D]` → `[G, t, n, D]`; sums are left in the precision of statistics."""
    dx_GctnD = dx_CtnD.unflatten(0, (-1, copies))
    return dx_GctnD.squeeze(1) if copies == 1 else dx_GctnD.sum(1, dtype=compute_dtype(dx_CtnD.dtype))


def _kernel_serves(head_dim: int, cos_sin: CosSin | None, *tensors: Tensor | None) -> bool:
    fits = head_dim % 2 == 0 and head_dim <= MAX_KERNEL_HEAD_DIM
    return fits and serves(*(x for x in (*tensors, *(cos_sin or ())) if x is not None))


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} of shape {list(x.shape)} does not fit the heads of the send layout; {list(shape)} does")
