"""RMSNorm against the formula in float64 with torch's autograd as the judge of the backward."""

import pytest
import torch

from megacp.kernels.rms_norm import rms_norm, rms_norm_backward

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # bf16: half a unit of the 8-bit mantissa


def reference(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight.double()


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (7, 32), (5, 3, 16), (64,)])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_forward_and_backward_match_float64_autograd(dtype, shape, eps):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype)
    dy = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    y64 = reference(x64, weight64, eps)
    y64.backward(dy.double())

    y = rms_norm(x, weight, eps)
    dx, dweight = rms_norm_backward(dy, x, weight, eps)

    assert y.dtype == dx.dtype == dtype
    assert dweight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative(y, y64.detach()) < TOLERANCE[dtype]
    # With one element per row dx is a small difference of equal terms: measure against the size of those terms.
    scale = max(x64.grad.norm().item(), (dy.double() * weight.double() / x64.detach()).norm().item())
    assert (dx.double() - x64.grad).norm().item() < 2 * TOLERANCE[dtype] * scale
    assert relative(dweight, weight64.grad) < (TOLERANCE[dtype] if dtype != torch.bfloat16 else 1e-6)


def test_inputs_are_left_alone_and_views_are_accepted():
    wide = torch.randn(6, 2, 8)
    x, dy, weight = wide[:, 1], torch.randn(6, 8), torch.randn(8)
    copies = [t.clone() for t in (wide, dy, weight)]
    dx, _ = rms_norm_backward(dy, x, weight, 1e-5)
    torch.testing.assert_close(dx, rms_norm_backward(dy, x.clone(), weight, 1e-5)[0])
    rms_norm(x, weight, 1e-5)
    for kept, now in zip(copies, (wide, dy, weight)):
        assert torch.equal(kept, now)


def test_wide_bf16_weight_gradient_is_accumulated_in_fp32():
    x, dy = torch.ones(4096, 2, dtype=torch.bfloat16), torch.ones(4096, 2, dtype=torch.bfloat16)
    _, dweight = rms_norm_backward(dy, x, torch.ones(2, dtype=torch.bfloat16), 0.0)
    assert dweight.tolist() == pytest.approx([4096.0, 4096.0], rel=1e-6)  # bf16 sums would stop at 256


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_before_the_rounding_and_its_memory_may_receive_the_sum(dtype):
    x, dy, residual, weight = (torch.randn(size, dtype=torch.float64).to(dtype) for size in [(5, 3, 16)] * 3 + [(16,)])
    x64 = x.double().requires_grad_()
    reference(x64, weight, 1e-5).backward(dy.double())
    exact = x64.grad + residual.double()
    _, dweight = rms_norm_backward(dy, x, weight, 1e-5)
    for out in (None, torch.empty_like(x), residual):
        dx, dweight_again = rms_norm_backward(dy, x, weight, 1e-5, residual, out)
        assert dx.dtype == dtype and (out is None or dx is out)
        assert relative(dx, exact) < TOLERANCE[dtype] / 2  # a second rounding, of dx alone, would show
        assert torch.equal(dweight, dweight_again)


def test_a_residual_or_output_that_does_not_fit_says_what_does():
    x, weight = torch.randn(3, 8), torch.ones(8)
    for wrong in ({"dy_Td": x[:2]}, {"residual": x[:2]}, {"out": x[:, :4]}):
        with pytest.raises(ValueError, match=r"\[3, 8\] does"):
            rms_norm_backward(**{"dy_Td": x, "x_Td": x, "weight_d": weight, "eps": 1e-5} | wrong)
    with pytest.raises(ValueError, match=r"out is torch.bfloat16, but x is torch.float32"):
        rms_norm_backward(x, x, weight, 1e-5, out=x.bfloat16())


def test_misfit_weight_says_what_fits():
    with pytest.raises(ValueError, match=r"\[8\] does"):
        rms_norm(torch.randn(3, 8), torch.randn(4), 1e-5)


def test_empty_shard():
    dx, dweight = rms_norm_backward(torch.empty(0, 4), torch.empty(0, 4), torch.ones(4), 1e-5)
    assert dx.shape == (0, 4) and dweight.tolist() == [0, 0, 0, 0]
