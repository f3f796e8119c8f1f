"""The Triton kernels of RMSNorm against float64 and autograd: compiled on a GPU, interpreted elsewhere."""

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels.rms_norm_triton import rms_norm_backward_triton, rms_norm_triton
from tests.kernels.rounding import UNIT, assert_rounded_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
SHAPES = [
    (1, 1), (64,),  # one row
    (7, 48), (3, 1000), (2, 5120),  # rows that are no power of two, also wider than a block
    (53, 3, 128), (999, 16),  # heads: several rows a block, the last block not full, several blocks a program
    (11, 2048),  # several blocks a program
]  # fmt: skip


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype).to(DEVICE)


def exact_results(dy, x, weight, eps):
    """y, dx and dweight in float64, and the size of the terms whose difference dx is."""
    x64, weight64 = (t.double().requires_grad_() for t in (x, weight))
    y64 = torch.nn.functional.rms_norm(x64, weight.shape, weight64, eps)
    y64.backward(dy.double())
    r = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    terms = (dy.double() * weight.double()).abs().amax(-1, keepdim=True) * r
    return y64.detach(), x64.grad, weight64.grad, terms


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_round_once(shape, dtype):
    x, dy, weight = random(shape, dtype, 0), random(shape, dtype, 1), random(shape[-1:], dtype, 2)
    y64, dx64, dweight64, terms = exact_results(dy, x, weight, EPS)
    assert_rounded_once(rms_norm_triton(x, weight, EPS), y64)

    dx, dweight = rms_norm_backward_triton(dy, x, weight, EPS)

    assert dx.dtype == dtype and dweight.dtype == torch.float32
    assert_rounded_once(dx, dx64, terms)
    assert_rounded_once(dweight, dweight64, (dy.double() * y64 / weight.double()).abs().reshape(-1, shape[-1]).sum(0))


@pytest.mark.parametrize("dtype", UNIT)
def test_residual_is_added_before_the_rounding_and_its_memory_may_receive_the_sum(dtype):
    shape = (13, 5, 64)
    x, dy, residual, weight = (random(shape if seed < 3 else shape[-1:], dtype, seed) for seed in range(4))
    _, dx64, dweight64, terms = exact_results(dy, x, weight, EPS)
    exact = dx64 + residual.double()
    out = torch.empty_like(x)
    for receiver in (None, out, residual):
        dx, dweight = rms_norm_backward_triton(dy, x, weight, EPS, residual, receiver)
        assert receiver is None or dx is receiver
        assert_rounded_once(dx, exact, terms + 10)
    assert_rounded_once(dweight, dweight64, 1000)


def test_fp32_residual_of_bf16_activations_and_a_gradient_that_takes_the_place_of_dy():
    x, dy, weight = random((9, 40), torch.bfloat16, 0), random((9, 40), torch.bfloat16, 1), random((40,), torch.float32, 2)
    residual = random((9, 40), torch.float32, 3)
    _, dx64, _, terms = exact_results(dy, x, weight, EPS)
    dx, _ = rms_norm_backward_triton(dy, x, weight, EPS, residual, out=dy)
    assert dx is dy
    assert_rounded_once(dx, dx64 + residual.double(), terms + 10)


def test_rows_with_a_stride_and_what_lies_between_them_is_left_alone():
    wide = {name: random((9, 100 + seed), torch.float32, seed) for seed, name in enumerate(("x", "dy", "residual", "out"))}
    x, dy, residual, out = (tensor[:, 30:80] for tensor in wide.values())
    weight = random((50,), torch.float32, 9)
    before = {name: tensor.clone() for name, tensor in wide.items()}
    y64, dx64, _, terms = exact_results(dy, x, weight, EPS)
    y = rms_norm_triton(x, weight, EPS)
    assert y.is_contiguous()
    assert_rounded_once(y, y64)
    assert_rounded_once(rms_norm_backward_triton(dy, x, weight, EPS, residual, out)[0], dx64 + residual.double(), terms + 10)
    before["out"][:, 30:80] = out
    assert all(torch.equal(before[name], wide[name]) for name in wide)


def test_large_and_vanishing_rows():
    """Squares of 1e18 are near the end of fp32; eps alone holds up rows of zeros."""
    x = torch.tensor([[1e18, -1e18, 2e18, 0.0], [0.0] * 4, [1e-12] * 4], device=DEVICE)
    weight, dy = torch.tensor([1.0, 2.0, -1.0, 0.5], device=DEVICE), torch.ones(3, 4, device=DEVICE)
    y64, dx64, dweight64, terms = exact_results(dy, x, weight, EPS)
    assert_rounded_once(rms_norm_triton(x, weight, EPS), y64)
    dx, dweight = rms_norm_backward_triton(dy, x, weight, EPS)
    assert_rounded_once(dx, dx64, terms)
    assert_rounded_once(dweight, dweight64, 4.0)


def test_same_input_same_bits():
    x, dy, weight = random((999, 16), torch.bfloat16, 0), random((999, 16), torch.bfloat16, 1), random((16,), torch.bfloat16, 2)
    first = rms_norm_backward_triton(dy, x, weight, EPS)
    again = rms_norm_backward_triton(dy, x, weight, EPS)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
