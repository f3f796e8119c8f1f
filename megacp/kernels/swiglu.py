"""The gated activation of the MLP and its explicit backward, in place (Shazeer, arXiv 2002.05202: SwiGLU).

    z = silu(gate) * up,   silu(a) = a * sigmoid(a)

Worked example: gate_tF = [[0, 2]], up_tF = [[5, 3]] give z_tF = [[0, 5.2848]], which stands in `gate_tF` afterwards.

Arithmetic is fp32 (float64 for float64 inputs), each result is rounded once to the dtype of `gate`. Tensors as wide as the MLP
are the largest of a layer's tile, so results take the place of what they were made from. On a GPU each function is one Triton
kernel; the fp32 buffers of the plain-torch reference are of at most `BUFFER_ELEMENTS` elements (64 MiB each).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype
from megacp.kernels.triton_support import are_rows, is_predicted, serves

BUFFER_ELEMENTS = 2**24


def swiglu_(gate_tF: Tensor, up_tF: Tensor) -> Tensor:
    """silu(gate) * up, in the place of `gate`, which is returned."""
    _check_shapes(gate_tF, up_tF)
    if is_predicted(gate_tF):
        return gate_tF
    if serves(gate_tF, up_tF) and are_rows(gate_tF, up_tF):
        from megacp.kernels.swiglu_triton import swiglu_triton_

        return swiglu_triton_(gate_tF, up_tF)
    return swiglu_reference_(gate_tF, up_tF)


def swiglu_backward_(dz_tF: Tensor, gate_tF: Tensor, up_tF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate_tF, dup_tF, z_tF) in the places of gate, up and dz: the gradients, and z again, for the down projection's.

    silu'(a) = sigmoid(a) + silu(a) * (1 - sigmoid(a)).
    """
    _check_shapes(dz_tF, gate_tF, up_tF)
    if is_predicted(dz_tF):
        return gate_tF, up_tF, dz_tF
    if serves(dz_tF, gate_tF, up_tF) and are_rows(dz_tF, gate_tF, up_tF):
        from megacp.kernels.swiglu_triton import swiglu_backward_triton_

        return swiglu_backward_triton_(dz_tF, gate_tF, up_tF)
    return swiglu_backward_reference_(dz_tF, gate_tF, up_tF)


def swiglu_reference_(gate_tF: Tensor, up_tF: Tensor) -> Tensor:
    """`swiglu_` in plain torch."""
    for rows in _rows(gate_tF):
        gate = gate_tF[rows]
        activation = torch.sigmoid(gate.to(compute_dtype(gate.dtype)))
        gate.copy_(activation.mul_(gate).mul_(up_tF[rows]))
    return gate_tF


def swiglu_backward_reference_(dz_tF: Tensor, gate_tF: Tensor, up_tF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_backward_` in plain torch."""
    for rows in _rows(gate_tF):
        dz, gate, up = dz_tF[rows], gate_tF[rows], up_tF[rows]
        sigmoid = torch.sigmoid(gate.to(compute_dtype(gate.dtype)))
        activation = sigmoid * gate
        z = (activation * up).to(gate.dtype)
        dup = (activation * dz).to(gate.dtype)
        slope = activation.mul_(1 - sigmoid).add_(sigmoid)
        gate.copy_(slope.mul_(up).mul_(dz))
        up.copy_(dup)
        dz.copy_(z)
    return gate_tF, up_tF, dz_tF


def _rows(x_tF: Tensor) -> Iterator[slice]:
    """Runs of rows of at most BUFFER_ELEMENTS elements, or of one row."""
    rows = max(1, BUFFER_ELEMENTS // x_tF.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(x_tF), rows))


def _check_shapes(*tensors_tF: Tensor) -> None:
    shapes = [list(x.shape) for x in tensors_tF]
    if len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"SwiGLU takes matrices [t, F] of one shape, not {', '.join(map(str, shapes))}")
