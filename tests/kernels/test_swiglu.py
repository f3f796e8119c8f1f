"""SwiGLU against torch's own silu in float64 and autograd."""

import pytest
import torch

from megacp.kernels import swiglu
from megacp.kernels.swiglu import swiglu_, swiglu_backward_

TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-7, torch.bfloat16: 4e-3}


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (33, 48)])
def test_forward_and_backward_match_float64_autograd(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    gate, up, dz = (torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype) for _ in range(3))
    gate64, up64, dz64 = (t.double().clone() for t in (gate, up, dz))
    gate64.requires_grad_()
    up64.requires_grad_()
    z64 = torch.nn.functional.silu(gate64) * up64
    z64.backward(dz64)
    up_before = up.clone()

    z = swiglu_(gate.clone(), up)
    assert torch.equal(up, up_before)
    dgate, dup, z_again = swiglu_backward_(dz, gate, up)

    assert (dgate is gate) and (dup is up) and (z_again is dz), "results take the place of what they were made from"
    assert z.dtype == dgate.dtype == dup.dtype == z_again.dtype == dtype
    for ours, exact in ((z, z64.detach()), (z_again, z64.detach()), (dgate, gate64.grad), (dup, up64.grad)):
        assert relative(ours, exact) < TOLERANCE[dtype]


def test_buffers_of_a_few_rows_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    gate, up, dz = (torch.randn(33, 48, generator=generator) for _ in range(3))
    whole = swiglu_(gate.clone(), up), *swiglu_backward_(dz.clone(), gate.clone(), up.clone())
    for elements in (1, 48, 200):
        monkeypatch.setattr(swiglu, "BUFFER_ELEMENTS", elements)
        parts = swiglu_(gate.clone(), up), *swiglu_backward_(dz.clone(), gate.clone(), up.clone())
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)  # the ends of vectors round differently


def test_large_gates_stay_finite():
    gate = torch.tensor([[-200.0, 200.0, 0.0]])
    dgate, dup, z = swiglu_backward_(torch.ones(1, 3), gate, torch.ones(1, 3))
    assert z.tolist() == [[0.0, 200.0, 0.0]]
    assert dgate.tolist() == [[0.0, 1.0, 0.5]]
    assert dup.tolist() == [[0.0, 200.0, 0.0]]


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"one shape, not \[2, 3\], \[1, 3\]"):
        swiglu_(torch.ones(2, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"one shape, not \[2, 3\], \[2, 3\], \[2, 4\]"):
        swiglu_backward_(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 4))
