"""Cross-entropy of a tile of logits in Triton: loss and gradient, in place; `cross_entropy.py` has the formulas.

One program a row, two passes. The first keeps, in each of LANES lanes, a running maximum m and the sum of exp(x - m) of what the
lane has seen (Milakov and Gimelshein, arXiv 1805.02867); the lanes are joined at the end. The second writes the gradient, beginning
with what was read last.

Worked example, logits [2048, 128256] in bf16: a row is 250 KiB; the 264 rows that run at a time on 132 processors are 64 MiB, most
of which an L2 cache of 50 MiB still holds for the second pass. So the traffic is near the least possible, 501 MiB read and 501 MiB
written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacp.kernels.cross_entropy import IGNORE_INDEX

LANES, VECTOR, NUM_WARPS = 1024, 8, 32  # one lane a thread; 16 bytes of bf16 are loaded at a time
REPEATS = 2  # loads of a thread in a step of the loop, which takes 16,384 logits: 32 registers, so two programs fit a processor
LOWEST = tl.constexpr(-3.4e38)  # finite, so that a lane that has seen only -inf gives exp(-inf - LOWEST) = 0, not nan


@triton.jit
def _kernel(
    logits_ptr, labels_ptr, loss_ptr, row_stride, vocab, grad_scale,
    IGNORE: tl.constexpr, REPEATS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = REPEATS * LANES * VECTOR
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    blocks = tl.cdiv(vocab, BLOCK)
    first = (tl.arange(0, REPEATS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]) * VECTOR
    within = first + tl.arange(0, VECTOR)[None, None, :]

    if label == IGNORE:
        for block in range(blocks):
            column = block * BLOCK + within
            tl.store(row_ptr + column, tl.zeros([REPEATS, LANES, VECTOR], logits_ptr.dtype.element_ty), mask=column < vocab)
        tl.store(loss_ptr + row, 0.0)
    else:
        known = (label >= 0) & (label < vocab)
        label_logit = tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32)
        lane_max = tl.full([LANES], LOWEST, tl.float32)
        lane_sum = tl.zeros([LANES], tl.float32)
        for block in range(blocks):
            column = block * BLOCK + within
            x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(lane_max, tl.max(tl.max(x, axis=2), axis=0))
            exp = tl.exp(x - higher[None, :, None])
            lane_sum = lane_sum * tl.exp(lane_max - higher) + tl.sum(tl.sum(exp, axis=2), axis=0)
            lane_max = higher
        maximum = tl.max(lane_max, axis=0)
        total = tl.sum(lane_sum * tl.exp(lane_max - maximum), axis=0)
        tl.store(loss_ptr + row, tl.log(total) + (maximum - label_logit))

        scale = tl.where(known, grad_scale, float("nan"))
        for step in range(blocks):
            column = (blocks - 1 - step) * BLOCK + within
            x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - maximum) * (scale / total) - tl.where(column == label, scale, 0.0)
            tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < vocab)


def cross_entropy_forward_backward_triton_(logits_tV: Tensor, labels_t: Tensor, grad_scale: float) -> Tensor:
    """As `cross_entropy_forward_backward_`, for logits of contiguous rows."""
    tokens, vocab = logits_tV.shape
    loss_t = torch.empty(tokens, dtype=torch.float32, device=logits_tV.device)
    with torch.cuda.device_of(logits_tV):
        _kernel[(tokens,)](
            logits_tV, labels_t.contiguous(), loss_t, logits_tV.stride(0), vocab, grad_scale,
            IGNORE=IGNORE_INDEX, REPEATS=REPEATS, LANES=LANES, VECTOR=VECTOR, num_warps=NUM_WARPS,
        )  # fmt: skip
    return loss_t
