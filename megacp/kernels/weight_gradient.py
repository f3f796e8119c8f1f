"""Weight gradients summed over tiles of tokens without rounding between the tiles.

    total_oi += dy_to^T x_ti          total is fp32 for bf16, fp16 and fp32 activations, float64 for float64

Worked example: 16 tiles of 8,192 tokens give one fp32 sum over 131,072 tokens. With a bf16 total every tile after the first
would be rounded to 8 bits beside a sum that is sixteen times as large.

The sum is the GEMM's own (beta = 1): no product of the size of the weight is written and read again. A stage's rows of a weight
are not one matrix, but C runs of n heads, `[C, n, D, i]`. C GEMMs of 128 rows would leave most of a GPU idle, so the tiles of a
stage are summed in a matrix of their own and the sum goes to its C places once (Llama3-8B, U = 8: 16 MiB, [1024, 4096] in fp32).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype


def accumulate_weight_gradient(total_oi: Tensor, dy_to: Tensor, x_ti: Tensor, first: bool = False) -> None:
    """Adds dy^T x to the matrix `total_oi`, in place; `matrix_total` makes one of a slice of heads.

    `first`: nothing is there yet, and what the memory holds is overwritten, not read: no zeros need be written before.
    """
    dtype = compute_dtype(x_ti.dtype)
    if x_ti.dtype == dtype or x_ti.device.type == "meta":  # on the meta device nothing is computed, and this takes nothing
        total_oi.addmm_(dy_to.t(), x_ti, beta=0 if first else 1)  # beta = 0 lets nan pass by
    elif x_ti.device.type == "cpu":
        total_oi.addmm_(dy_to.t().to(dtype), x_ti.to(dtype), beta=0 if first else 1)
    elif first:
        torch.mm(dy_to.t(), x_ti, out_dtype=dtype, out=total_oi)
    else:
        # `out` is the summand itself, so nothing is copied; an fp32 summand beside bf16 factors is accepted since torch 2.10.
        torch.addmm(total_oi, dy_to.t(), x_ti, out_dtype=dtype, out=total_oi)


@contextmanager
def matrix_total(total: Tensor) -> Iterator[Tensor]:
    """A total of any shape `[..., i]` as a matrix `[o, i]` to accumulate in; what was accumulated is in `total` at the end.

    It is `total` itself where that is contiguous, else a matrix of zeros that is added to `total` when the block ends.
    """
    if total.is_contiguous():
        yield total.view(-1, total.shape[-1])
        return
    sum_oi = total.new_zeros(total.shape[:-1].numel(), total.shape[-1])
    yield sum_oi
    total += sum_oi.view(total.shape)
