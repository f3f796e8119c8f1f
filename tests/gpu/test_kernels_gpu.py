"""The small kernels on a GPU: bf16 and fp32 against float64, tensors of more than 2^31 elements, and how fast they are.

    python -m pytest -s tests/gpu/test_kernels_gpu.py -k copy     prints the speeds
"""

import statistics

import pytest
import torch

from megacp.kernels.cross_entropy import (
    IGNORE_INDEX,
    cross_entropy_forward_backward_,
    cross_entropy_forward_backward_reference_,
)
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_backward_reference, rms_norm_reference
from megacp.kernels.rotary import apply_rotary, inverse_frequencies, rotary_cos_sin
from megacp.kernels.scale import scale_
from megacp.kernels.swiglu import swiglu_, swiglu_backward_, swiglu_backward_reference_, swiglu_reference_
from megacp.kernels.triton_support import serves
from tests.kernels.rounding import assert_rounded_once

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
    exact = swiglu_backward_(dy64.clone(), x64.clone(), dy64.clone())
    for name, ours, exact_part in zip(("dgate", "dup", "z"), swiglu_backward_(dy.clone(), x.clone(), dy.clone()), exact):
        assert_near(ours, exact_part, dtype, name)

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


def assert_repeats(whole, rows, what):
    """Every part of `whole` is `rows`, give or take a last bit: sums may run in another order over many rows than over few."""
    parts = whole.view(-1, *rows.shape)
    for extreme in (parts.amax(0), parts.amin(0)):
        torch.testing.assert_close(extreme, rows, rtol=2e-2, atol=1e-2 * rows.abs().mean().item(),
                                   msg=lambda text: f"{what}: {text}")


def chunks():
    """Rows of a tensor past 2^31 elements, 2^26 elements at a time."""
    return (slice(start, start + 2**15) for start in range(0, ROWS, 2**15))


def test_rms_norm_past_2_to_the_31_elements_against_the_reference_in_chunks():
    x, dy, residual = (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    weight = random(WIDTH, dtype=torch.bfloat16)
    assert serves(x) and x.numel() > 2**31
    y = rms_norm(x, weight, 1e-5)
    for rows in chunks():
        assert_rounded_once(y[rows], rms_norm_reference(x[rows], weight, 1e-5).double())
    del y
    dx, dweight = rms_norm_backward(dy, x, weight, 1e-5, residual)
    total = torch.zeros(WIDTH, dtype=torch.float64, device=DEVICE)
    for rows in chunks():
        exact, part = rms_norm_backward_reference(dy[rows], x[rows], weight, 1e-5, residual[rows])
        assert_rounded_once(dx[rows], exact.double(), 20.0)
        total += part
    assert ((dweight - total).norm() / total.norm()).item() < 2e-5  # thousands of rows are added one after another


def test_swiglu_past_2_to_the_31_elements_against_the_reference_in_chunks():
    dz, gate, up = (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    assert serves(gate) and gate.numel() > 2**31
    z = swiglu_(gate.clone(), up)
    for rows in chunks():
        assert_rounded_once(z[rows], swiglu_reference_(gate[rows].clone(), up[rows]).double())
    ours = swiglu_backward_(dz.clone(), gate.clone(), up.clone())
    for rows in chunks():
        exact = swiglu_backward_reference_(*(tensor[rows].clone() for tensor in (dz, gate, up)))
        for part, exact_part in zip(ours, exact):
            assert_rounded_once(part[rows], exact_part.double(), 20.0)


def test_rotary_past_2_to_the_31_elements():
    few = random(8, WIDTH // 128, 128, dtype=torch.bfloat16)
    frequencies = inverse_frequencies(128, 10_000.0, device=DEVICE)
    cos, sin = rotary_cos_sin(torch.arange(8, device=DEVICE).repeat(ROWS // 8), frequencies)
    many = few.expand(ROWS // 8, *few.shape).flatten(0, 1)
    apply_rotary(many, cos, sin, out=many)
    assert_repeats(many, apply_rotary(few, cos[:8], sin[:8]), "rotary")


def test_cross_entropy_past_2_to_the_31_elements_against_the_reference_in_chunks():
    tokens, vocab = 2**13 + 8, 2**18
    logits = torch.randn(tokens, vocab, dtype=torch.bfloat16, device=DEVICE)
    labels = torch.randint(vocab, (tokens,), device=DEVICE)
    labels[::5] = IGNORE_INDEX
    assert serves(logits) and logits.numel() > 2**31
    gradient = logits.clone()
    loss = cross_entropy_forward_backward_(gradient, labels, 1000.0)
    for rows in (slice(start, start + 256) for start in range(0, tokens, 256)):
        exact_loss = cross_entropy_forward_backward_reference_(logits[rows], labels[rows], 1000.0)
        assert_rounded_once(loss[rows], exact_loss.double(), 20.0)
        assert_rounded_once(gradient[rows], logits[rows].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 4096), (4096, 5120), (2048, 8192), (100, 16384), (8192, 8, 128)])
def test_rms_norm_at_real_shapes_rounds_once(shape, dtype):
    x, dy, residual, weight = (random(*size, dtype=dtype) for size in (shape, shape, shape, shape[-1:]))
    x64, dy64, weight64 = x.double(), dy.double(), weight.double()
    assert_rounded_once(rms_norm(x, weight, 1e-5), rms_norm_reference(x64, weight64, 1e-5))
    dx64, dweight64 = rms_norm_backward_reference(dy64, x64, weight64, 1e-5, residual.double())
    dx, dweight = rms_norm_backward(dy, x, weight, 1e-5, residual, out=residual)
    assert dx is residual
    assert_rounded_once(dx, dx64, 20.0)
    assert ((dweight - dweight64).norm() / dweight64.norm()).item() < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 14336), (1000, 25600), (77, 12289)])
def test_swiglu_at_real_shapes_rounds_once(shape, dtype):
    dz, gate, up = (random(*shape, dtype=dtype) for _ in range(3))
    exact = swiglu_backward_reference_(dz.double(), gate.double(), up.double())
    assert_rounded_once(swiglu_(gate.clone(), up), exact[2])
    for ours, exact_part in zip(swiglu_backward_(dz, gate, up), exact):
        assert_rounded_once(ours, exact_part, 20.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, vocab", [(1000, 128_256), (300, 151_936), (100, 262_144), (7, 50_257)])
def test_cross_entropy_at_real_vocabularies_rounds_once(tokens, vocab, dtype):
    logits, labels = random(tokens, vocab, dtype=dtype).mul_(3), torch.randint(vocab, (tokens,), device=DEVICE)
    labels[::7] = IGNORE_INDEX
    gradient64 = logits.double()
    loss64 = cross_entropy_forward_backward_reference_(gradient64, labels, 1000.0)
    assert_rounded_once(cross_entropy_forward_backward_(logits, labels, 1000.0), loss64, 20.0)
    assert_rounded_once(logits, gradient64, 4 * gradient64.abs())


def test_speed_beside_a_copy(capsys):
    """Not asserted, since other work may run on the GPU: bytes read and written once over time, and the same of a copy."""
    copied, target = torch.empty(2, 2**28, dtype=torch.bfloat16, device=DEVICE)
    lines, peak = [], bytes_per_second(2 * copied.nbytes, [copied], lambda: target.copy_(copied))
    for name, bytes_moved, inputs, kernel in speed_cases():
        speed = bytes_per_second(bytes_moved, inputs, kernel)
        lines.append(f"{name:44s} {speed / 1e9:5.0f} GB/s  {speed / peak:4.0%} of a copy's {peak / 1e9:.0f}")
    with capsys.disabled():
        print("", *lines, sep="\n")


def speed_cases():
    """Name, bytes that must move at the least, inputs to be filled, and a function without arguments."""

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE)

    x, dy, g, weight = *empty(3, 8192, 4096), empty(4096)
    yield "rms_norm [8192, 4096]", 2 * x.nbytes, [x, weight], lambda: rms_norm(x, weight, 1e-5)
    yield "rms_norm_backward [8192, 4096] + residual", 4 * x.nbytes, [x, dy, g, weight], lambda: rms_norm_backward(
        dy, x, weight, 1e-5, g, g
    )
    gate, up, dz = empty(3, 8192, 14336)
    yield "swiglu_ [8192, 14336]", 3 * gate.nbytes, [gate, up], lambda: swiglu_(gate, up)
    yield "swiglu_backward_ [8192, 14336]", 6 * gate.nbytes, [gate, up, dz], lambda: swiglu_backward_(dz, gate, up)
    logits, labels = empty(4096, 128_256), torch.randint(128_256, (4096,), device=DEVICE)
    yield "cross-entropy [4096, 128256]", 2 * logits.nbytes, [logits], lambda: cross_entropy_forward_backward_(logits, labels, 1.0)


def bytes_per_second(bytes_moved, inputs, kernel, runs=20):
    """Median over `runs`, each on fresh values: in place, repeated results would run to zero or infinity."""
    times = []
    for _ in range(runs + 1):
        for tensor in inputs:
            tensor.normal_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # cycles: the launch is queued before the clock starts
        start.record()
        kernel()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return bytes_moved / statistics.median(times[1:])  # the first compiles


@pytest.mark.parametrize("elements", [2**31 - 128, 2**31 + 4096])  # beside the border, where a count of blocks is rounded up past it
def test_scale_past_2_to_the_31_elements(elements):
    x = torch.ones(elements, dtype=torch.bfloat16, device=DEVICE)
    scale_(x, torch.tensor(3.0, device=DEVICE))
    assert x.amin().item() == x.amax().item() == 3.0
