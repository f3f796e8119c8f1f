"""The Triton kernels of SwiGLU against float64 and autograd: compiled on a GPU, interpreted elsewhere."""

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels.swiglu_triton import swiglu_backward_triton_, swiglu_triton_
from tests.kernels.rounding import UNIT, assert_rounded_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype).to(DEVICE) for _ in range(3)]


def exact_results(dz, gate, up):
    """z, dgate, dup in float64, and the size of the terms of each."""
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    z64 = torch.nn.functional.silu(gate64) * up64
    gradients = torch.autograd.grad(z64, (gate64, up64), dz.double())
    gate64, up64, dz64 = gate64.detach(), up64.detach(), dz.double()
    terms = z64.detach(), (1 + gate64.abs()) * up64 * dz64, gate64 * dz64
    return (z64.detach(), *gradients), [term.abs() for term in terms]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (5, 1024), (2, 2100)])
def test_forward_and_backward_round_once_in_place(shape, dtype):
    dz, gate, up = tensors(shape, dtype)
    (z64, dgate64, dup64), (z_terms, dgate_terms, dup_terms) = exact_results(dz, gate, up)
    up_before, z = up.clone(), gate.clone()
    assert swiglu_triton_(z, up) is z and torch.equal(up, up_before)
    assert_rounded_once(z, z64, z_terms)

    results = swiglu_backward_triton_(dz, gate, up)

    assert all(result is place for result, place in zip(results, (gate, up, dz)))
    assert_rounded_once(gate, dgate64, dgate_terms)
    assert_rounded_once(up, dup64, dup_terms)
    assert_rounded_once(dz, z64, z_terms)


def test_rows_with_a_stride_such_as_the_halves_of_one_product():
    wide_t2F = torch.randn(4, 90, device=DEVICE)  # and dz of another stride
    gate, up, between = wide_t2F[:, :37], wide_t2F[:, 50:87], wide_t2F[:, 37:50].clone()
    dz = torch.randn(4, 37, device=DEVICE)
    (z64, dgate64, dup64), (z_terms, dgate_terms, dup_terms) = exact_results(dz, gate, up)
    assert_rounded_once(swiglu_triton_(gate.clone(), up), z64, z_terms)
    swiglu_backward_triton_(dz, gate, up)
    for ours, exact, terms in ((dz, z64, z_terms), (gate, dgate64, dgate_terms), (up, dup64, dup_terms)):
        assert_rounded_once(ours, exact, terms)
    assert torch.equal(wide_t2F[:, 37:50], between)


def test_large_gates_stay_finite():
    gate = torch.tensor([[-200.0, 200.0, 0.0]], device=DEVICE)
    dgate, dup, z = swiglu_backward_triton_(torch.ones(1, 3, device=DEVICE), gate, torch.ones(1, 3, device=DEVICE))
    assert z.tolist() == [[0.0, 200.0, 0.0]]
    assert dgate.tolist() == [[0.0, 1.0, 0.5]]
    assert dup.tolist() == [[0.0, 200.0, 0.0]]
