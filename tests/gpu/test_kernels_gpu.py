"""The small kernels on a GPU: bf16 and fp32 against float64, and tensors of more than 2^31 elements."""

import pytest
import torch

from megacp.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_forward_backward_
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.rotary import apply_rotary, inverse_frequencies, rotary_cos_sin
from megacp.kernels.swiglu import swiglu_, swiglu_backward_

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # one rounding of the result: 2^-9 for bf16
ROWS = 2**20 + 8  # rows of 2,048 elements: just past 2^31
WIDTH = 2048


def random(*shape, dtype):
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


def assert_near(ours, exact, dtype, what):
    error = ((ours.double() - exact.double()).norm() / exact.double().norm()).item()
    assert error < TOLERANCE[dtype], f"{what}: {error}"


@pytest.fixture(autouse=True)
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_match_their_float64_selves(dtype):
    """The float64 results are those that the CPU tests hold against independent references."""
    x, dy, weight = random(300, 512, dtype=dtype), random(300, 512, dtype=dtype), random(512, dtype=dtype)
    x64, dy64, weight64 = x.double(), dy.double(), weight.double()
    assert_near(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x64, (512,), weight64, 1e-5), dtype, "rms_norm")
    for name, ours, exact in zip(("dx", "dweight"), rms_norm_backward(dy, x, weight, 1e-5),
                                 rms_norm_backward(dy64, x64, weight64, 1e-5)):
        assert_near(ours, exact, dtype, name)
    assert_near(swiglu_(x.clone(), dy), torch.nn.functional.silu(x64) * dy64, dtype, "swiglu")
    for name, ours, exact in zip(("dgate", "dup", "z"), swiglu_backward_(dy.clone(), x.clone(), dy.clone()), swiglu_backward_(dy64.clone(), x64.clone(), dy64.clone())):
        assert_near(ours, exact, dtype, name)

    labels = torch.randint(512, (300,), device=DEVICE)
    labels[::7] = IGNORE_INDEX
    logits, exact = x.clone(), x64.clone().requires_grad_()
    loss64 = torch.nn.functional.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="none")
    (gradient,) = torch.autograd.grad(loss64.sum() * 0.5, exact)
    assert_near(cross_entropy_forward_backward_(logits, labels, 0.5), loss64, torch.float32, "loss")
    assert_near(logits, gradient, dtype, "dlogits")


def test_rotary_angles_at_ten_million_are_those_of_the_cpu():
    positions, frequencies = torch.arange(9_999_000, 10_000_001), inverse_frequencies(128, 500_000.0)
    on_gpu = rotary_cos_sin(positions.to(DEVICE), frequencies.to(DEVICE), dtype=torch.float64)
    for ours, exact in zip(on_gpu, rotary_cos_sin(positions, frequencies, dtype=torch.float64)):
        assert (ours.cpu() - exact).abs().max().item() < 1e-12
    yarn_factor = 1.4852030263919618
    in_fp32 = rotary_cos_sin(positions.to(DEVICE), frequencies.to(DEVICE), yarn_factor)
    for ours, exact in zip(in_fp32, rotary_cos_sin(positions, frequencies, yarn_factor, torch.float64)):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=2**-24, atol=1e-9)  # rounded once
    x = random(len(positions), 4, 128, dtype=torch.bfloat16)
    cos, sin = rotary_cos_sin(positions.to(DEVICE), frequencies.to(DEVICE))
    assert_near(apply_rotary(x, cos, sin), apply_rotary(x.double(), *on_gpu), torch.bfloat16, "rotary")


def tiled(rows):
    """ROWS rows that repeat `rows`, more than 2^31 elements."""
    assert ROWS * WIDTH > 2**31 and ROWS % rows.shape[0] == 0
    return rows.expand(ROWS // rows.shape[0], *rows.shape).flatten(0, 1)


def assert_repeats(whole, rows, what):
    """Every part of `whole` is `rows`, give or take a last bit: sums may run in another order over many rows than over few."""
    parts = whole.view(-1, *rows.shape)
    for extreme in (parts.amax(0), parts.amin(0)):
        torch.testing.assert_close(extreme, rows, rtol=2e-2, atol=1e-2 * rows.abs().mean().item(),
                                   msg=lambda text: f"{what}: {text}")


def test_rms_norm_and_swiglu_past_2_to_the_31_elements():
    few, weight = random(8, WIDTH, dtype=torch.bfloat16), random(WIDTH, dtype=torch.bfloat16)
    many = tiled(few)
    assert_repeats(rms_norm(many, weight, 1e-5), rms_norm(few, weight, 1e-5), "rms_norm")
    dx, dweight = rms_norm_backward(many, many, weight, 1e-5)
    dx_few, dweight_few = rms_norm_backward(few, few, weight, 1e-5)
    assert_repeats(dx, dx_few, "dx")
    torch.testing.assert_close(dweight / (ROWS // 8), dweight_few, rtol=1e-3, atol=1e-3)
    del dx
    assert_repeats(swiglu_(many.clone(), many), swiglu_(few.clone(), few), "swiglu")


def test_rotary_past_2_to_the_31_elements():
    few = random(8, WIDTH // 128, 128, dtype=torch.bfloat16)
    frequencies = inverse_frequencies(128, 10_000.0, device=DEVICE)
    cos, sin = rotary_cos_sin(torch.arange(8, device=DEVICE).repeat(ROWS // 8), frequencies)
    many = few.expand(ROWS // 8, *few.shape).flatten(0, 1)
    apply_rotary(many, cos, sin, out=many)
    assert_repeats(many, apply_rotary(few, cos[:8], sin[:8]), "rotary")


def test_cross_entropy_past_2_to_the_31_elements():
    tokens, vocab = 2**14 + 8, 2**17
    few, labels = random(8, vocab, dtype=torch.bfloat16), torch.randint(vocab, (8,), device=DEVICE)
    labels[3] = IGNORE_INDEX
    many = few.expand(tokens // 8, *few.shape).flatten(0, 1)
    assert many.numel() > 2**31
    loss = cross_entropy_forward_backward_(many, labels.repeat(tokens // 8), 0.25)
    exact = few.double().requires_grad_()
    loss64 = torch.nn.functional.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="none")
    (gradient,) = torch.autograd.grad(loss64.sum() * 0.25, exact)
    assert_near(loss.view(-1, 8), loss64.expand(tokens // 8, 8), torch.float32, "loss")
    assert_near(many[:8], gradient, torch.bfloat16, "dlogits")
    assert_repeats(many, many[:8].clone(), "dlogits")
