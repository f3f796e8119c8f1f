"""`linear_cross_entropy` with the cross-entropy inside the matrix products, put together from QuACK's composable GEMMs (Hopper, bf16).

Base 2 throughout: x = z · log2(e) of a logit z. For each token and column tile of the vocabulary an integer offset, the tile's
maximum rounded, keeps exponentials in range:

    first product     E = 2^(x - offset) in bf16, its sum over the tile, the label's logit; z itself is never stored
    finish_rows       top = max offset, total = Σ sum · 2^(offset - top);   loss = ln2 · (top + log2 total) - z[label]
                      E[label] -= total · 2^(top - offset),  so that  dz = scale · 2^(offset - top) · E,  scale = grad_scale / total
    second product    dy = scale ⊙ ((power ⊙ E) W),        power = 2^(offset - top)
    third product     dW += (power ⊙ E)ᵀ (scale ⊙ y)

`power` is an exact power of two, by which the products multiply E on its way from shared memory, so dlogits exist in registers
alone. Rounded to bf16 are E and scale ⊙ y; the native way rounds logits and dlogits. The third product's sum is added to dW by the
copy engine: dW is not read.

Worked example, Llama3-8B, a tile of 4,096 tokens: E is [4096, 128256], 668 column tiles of 192 words.
"""

import torch
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import identity_epi
from quack.epilogue.ops import ColVecLoad
from quack.epilogue.scaled_exp import scaled_exp_target_epi
from quack.operand_transform.frontend import a_transform
from quack.operand_transform.host import transform_a_operand
from torch import Tensor

from megacp.kernels.linear_cross_entropy import ROWS, Scratch, column_tile
from megacp.kernels.linear_cross_entropy_triton import finish_rows

# Two programs with the same columns share what they read of them. Llama3-8B's head, 131,072 tokens in tiles of 4,096 on an H200 at its
# power limit: 19.56 ms a tile; with (1, 2) in the first product 19.8, in the second 19.6, in the third 19.6; the native way 20.1.
CLUSTER_ROWS, CLUSTER_COLUMNS = 2, 1
DEPTH = 64  # of a step of the second and third product


@a_transform(vec_size=8, args={"power": "colvec_ktile"})
def _with_power_of_row(e, power):
    return e * power


@a_transform(vec_size=8, args={"power": "kvec_m64"})
def _with_power_of_column(e, power):
    return e * power


@gemm_epilogue(ops={"scale": ColVecLoad("scale")})  # said to be of rows: with as many tokens as columns it could be either
def _scale_rows(acc, scale):
    return {"D": acc * scale}


def linear_cross_entropy_quack(
    y_td: Tensor, weight_Vd: Tensor, labels_t: Tensor, grad_scale: float, dweight_Vd: Tensor, first: bool
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, for bf16 factors with contiguous rows, tokens and vocabulary in multiples of 128."""
    tokens, hidden = y_td.shape
    vocab = len(weight_Vd)
    words = column_tile(vocab)
    if tokens % ROWS or words is None:
        raise ValueError(f"QuACK's cross-entropy takes multiples of {ROWS} tokens and words, not [{tokens}, {vocab}] logits")
    labels_t = labels_t.clone()  # aligned to the 16 bytes that are read at a time: a tile may begin with any token
    scratch = Scratch.like(y_td, vocab)
    e_tV = y_td.new_empty(tokens, vocab)
    scaled_exp_target_epi.gemm(
        y_td, weight_Vd, e_tV,
        epi_args={"max_log2": words, "sum_exp": scratch.sum_tn, "max_log2_out": scratch.offset_tn, "target": labels_t,
                  "target_logit": scratch.label_logit_t},
        tile_M=ROWS, tile_N=words, cluster_M=CLUSTER_ROWS, cluster_N=CLUSTER_COLUMNS, pingpong=True,
    )  # fmt: skip
    loss_t = finish_rows(e_tV, y_td, labels_t, grad_scale, scratch, words)

    columns = 192 if hidden % 192 == 0 else 256
    layout = {"tile_M": ROWS, "tile_N": columns, "tile_K": DEPTH, "cluster_M": CLUSTER_ROWS, "cluster_N": CLUSTER_COLUMNS}
    dy_td = torch.empty_like(y_td)
    _scale_rows.gemm(
        transform_a_operand(_with_power_of_row, e_tV, {"power": scratch.power_bt}, ROWS, DEPTH), weight_Vd.mT, dy_td,
        epi_args={"scale": scratch.scale_t[None]}, transform_a=_with_power_of_row, **layout,
    )  # fmt: skip
    identity_epi.gemm(
        transform_a_operand(_with_power_of_column, e_tV.t(), {"power": scratch.power_bt}, ROWS, DEPTH), scratch.scaled_td.mT, dweight_Vd,
        epi_args={}, transform_a=_with_power_of_column, add_to_output=not first, **layout,
    )  # fmt: skip
    return loss_t, dy_td
