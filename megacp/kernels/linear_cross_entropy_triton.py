"""What lies between the first matrix product of `linear_cross_entropy_quack` and the other two, in Triton.

From offsets and sums of a token's column tiles come its loss, its factor, and the powers of two by which its exponentials differ from
one offset for all; its label's exponential becomes that of the gradient. Formulas: `linear_cross_entropy_quack.py`.

Worked example, one token, two tiles of two words, logits [0, 0, 0, ln 2], label 3, grad_scale 1. Offsets [0, 1], exponentials
[1, 1, 0.5, 1], sums [2, 1.5]: top 1, total 1.5 + 2/2 = 2.5, scale 0.4, powers [0.5, 1], E[3] = 1 - 2.5 = -1.5. The loss is
ln(2^1 · 2.5) - ln 2 = ln 2.5, the gradient 0.4 · [0.5, 0.5, 0.5, -1.5] = softmax [0.2, 0.2, 0.2, 0.4] less 1 at the label.

A tile whose offset is more than 2^100 below the top would have a label beyond what bf16 holds; its power is held at 2^-100 and its
exponentials with it: they are wrong by less than 1e-30 of the token's greatest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.linear_cross_entropy import POWER_WORDS, Scratch

LEAST_POWER = tl.constexpr(-100.0)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
BLOCK_COLUMNS, BLOCK = 1024, 64


@triton.jit
def _row_kernel(
    e_ptr, y_ptr, label_ptr, sum_ptr, offset_ptr, label_logit_ptr, loss_ptr, scale_ptr, top_ptr, scaled_ptr,
    e_stride, y_stride, vocab, hidden, tiles, words, grad_scale,
    IGNORE: tl.constexpr, TILES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    within = tile < tiles
    offset = tl.load(offset_ptr + row * tiles + tile, mask=within, other=float("-inf"))
    sums = tl.load(sum_ptr + row * tiles + tile, mask=within, other=0.0)
    top = tl.max(offset, axis=0)
    total = tl.sum(sums * tl.exp2(offset - top), axis=0)
    tl.store(top_ptr + row, top)

    label = tl.load(label_ptr + row)
    known = (label >= 0) & (label < vocab)
    logit = tl.load(label_logit_ptr + row, mask=known, other=float("nan")) * LOG2E
    loss = tl.where(label == IGNORE, 0.0, (top + tl.log2(total) - logit) * LN2)
    scale = tl.where(label == IGNORE, 0.0, tl.where(known, grad_scale / total, float("nan")))
    tl.store(loss_ptr + row, loss)
    tl.store(scale_ptr + row, scale)
    at_label = tl.load(offset_ptr + row * tiles + label // words, mask=known, other=0.0)
    at_label = tl.maximum(at_label, top + LEAST_POWER)
    gradient = tl.exp2(logit - at_label) - total * tl.exp2(top - at_label)
    tl.store(e_ptr + row * e_stride + label, gradient.to(e_ptr.dtype.element_ty), mask=known)

    for start in range(0, hidden, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        y = tl.load(y_ptr + row * y_stride + column, mask=column < hidden).to(tl.float32)
        tl.store(scaled_ptr + row * hidden + column, (y * scale).to(scaled_ptr.dtype.element_ty), mask=column < hidden)


@triton.jit
def _power_kernel(
    offset_ptr, top_ptr, power_ptr, tokens, tiles, REPEATS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = (token < tokens)[:, None] & (tile < tiles)[None, :]
    offset = tl.load(offset_ptr + token[:, None] * tiles + tile[None, :], mask=within, other=0.0)
    top = tl.load(top_ptr + token, mask=token < tokens, other=0.0)
    power = tl.exp2(tl.maximum(offset - top[:, None], LEAST)).to(power_ptr.dtype.element_ty)
    power, within = tl.trans(power), tl.trans(within)
    for repeat in tl.static_range(REPEATS):
        block = tile.to(tl.int64)[:, None] * REPEATS + repeat
        tl.store(power_ptr + block * tokens + token[None, :], power, mask=within)


def finish_rows(e_tV: Tensor, y_td: Tensor, labels_t: Tensor, grad_scale: float, scratch: Scratch, words: int) -> Tensor:
    """Losses of the tokens, fp32; fills `scale_t`, `power_bt` and `scaled_td` of the scratch and turns the labels' exponentials.

    `words`: of a column tile. `label_logit_t` need not be set where a label is IGNORE_INDEX or out of range: the latter give a loss
    and a gradient row of nan.
    """
    tokens, tiles = scratch.offset_tn.shape
    vocab, hidden = e_tV.shape[1], y_td.shape[1]
    loss_t, top_t = (torch.empty(tokens, dtype=torch.float32, device=e_tV.device) for _ in range(2))
    with torch.cuda.device_of(e_tV):
        _row_kernel[(tokens,)](
            e_tV, y_td, labels_t.contiguous(), scratch.sum_tn, scratch.offset_tn, scratch.label_logit_t, loss_t, scratch.scale_t, top_t,
            scratch.scaled_td, e_tV.stride(0), y_td.stride(0), vocab, hidden, tiles, words, grad_scale,
            IGNORE=IGNORE_INDEX, TILES=triton.next_power_of_2(tiles), BLOCK_COLUMNS=BLOCK_COLUMNS,
        )  # fmt: skip
        _power_kernel[(triton.cdiv(tokens, BLOCK), triton.cdiv(tiles, BLOCK))](
            scratch.offset_tn, top_t, scratch.power_bt, tokens, tiles, REPEATS=words // POWER_WORDS, LEAST=LEAST_POWER, BLOCK=BLOCK,
        )  # fmt: skip
    return loss_t
