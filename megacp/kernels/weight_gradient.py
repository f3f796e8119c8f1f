"""Weight gradients summed over tiles of tokens without rounding between the tiles.

    total_oi += dy_to^T x_ti          total is fp32 for bf16, fp16 and fp32 activations, float64 for float64

Worked example: 16 tiles of 8,192 tokens give one fp32 sum over 131,072 tokens. With a bf16 total every tile after the first
would be rounded to 8 bits beside a sum that is sixteen times as large.
"""

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype


def accumulate_weight_gradient(total_oi: Tensor, dy_to: Tensor, x_ti: Tensor) -> None:
    """Adds dy^T x to `total_oi`, in place; the product leaves the matrix unit in the dtype of the total.

    `total_oi` is a view of any shape with o·i elements in that order, for instance a slice of heads `[C, n, D, i]`.
    """
    dtype = compute_dtype(x_ti.dtype)
    if x_ti.dtype == dtype:
        product_oi = dy_to.t() @ x_ti
    elif x_ti.device.type != "cpu":
        product_oi = torch.mm(dy_to.t(), x_ti, out_dtype=dtype)
    else:
        product_oi = dy_to.t().to(dtype) @ x_ti.to(dtype)
    total_oi.add_(product_oi.view(total_oi.shape))
