"""The gated activation of the MLP and its explicit backward (Shazeer, arXiv 2002.05202: SwiGLU).

    z = silu(gate) * up,   silu(a) = a * sigmoid(a)

Worked example: gate_tF = [[0, 2]], up_tF = [[5, 3]] give z_tF = [[0, 5.2848]].

Arithmetic is fp32 (float64 for float64 inputs), each result is rounded once to the dtype of `gate`. Forward holds one fp32
buffer of [t, F], backward three: t is a tile of tokens, never the whole rank.
"""

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype


def swiglu(gate_tF: Tensor, up_tF: Tensor) -> Tensor:
    """silu(gate) * up in the dtype of gate."""
    activation = torch.sigmoid(gate_tF.to(compute_dtype(gate_tF.dtype)))
    return activation.mul_(gate_tF).mul_(up_tF).to(gate_tF.dtype)


def swiglu_backward(dz_tF: Tensor, gate_tF: Tensor, up_tF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate_tF, dup_tF, z_tF): the gradients, and z again for the weight gradient of the down projection.

    silu'(a) = sigmoid(a) + silu(a) * (1 - sigmoid(a)).
    """
    dtype = gate_tF.dtype
    sigmoid = torch.sigmoid(gate_tF.to(compute_dtype(dtype)))
    activation = sigmoid * gate_tF
    z_tF = (activation * up_tF).to(dtype)
    dup_tF = (activation * dz_tF).to(dtype)
    slope = activation.mul_(1 - sigmoid).add_(sigmoid)
    dgate_tF = slope.mul_(up_tF).mul_(dz_tF).to(dtype)
    return dgate_tF, dup_tF, z_tF
