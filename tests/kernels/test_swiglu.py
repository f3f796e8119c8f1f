"""SwiGLU against torch's own silu in float64 and autograd."""

import pytest
import torch

from megacp.kernels.swiglu import swiglu, swiglu_backward

TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-7, torch.bfloat16: 4e-3}


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (33, 48)])
def test_forward_and_backward_match_float64_autograd(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    gate, up, dz = (torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype) for _ in range(3))
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    z64 = torch.nn.functional.silu(gate64) * up64
    z64.backward(dz.double())
    kept = [t.clone() for t in (gate, up, dz)]

    z = swiglu(gate, up)
    dgate, dup, z_again = swiglu_backward(dz, gate, up)

    assert z.dtype == dgate.dtype == dup.dtype == z_again.dtype == dtype
    for ours, exact in ((z, z64.detach()), (z_again, z64.detach()), (dgate, gate64.grad), (dup, up64.grad)):
        assert relative(ours, exact) < TOLERANCE[dtype]
    for before, now in zip(kept, (gate, up, dz)):
        assert torch.equal(before, now)


def test_large_gates_stay_finite():
    gate = torch.tensor([[-200.0, 200.0, 0.0]])
    dgate, dup, z = swiglu_backward(torch.ones(1, 3), gate, torch.ones(1, 3))
    assert z.tolist() == [[0.0, 200.0, 0.0]]
    assert dgate.tolist() == [[0.0, 1.0, 0.5]]
    assert dup.tolist() == [[0.0, 200.0, 0.0]]
