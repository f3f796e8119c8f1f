"""Rotary embedding: exact angles at position 10 million, scaling as in transformers and in closed form, transpose, in place."""

import decimal
import math

import pytest
import torch

from megacp.kernels.rotary import RopeScaling, apply_rotary, attention_factor, inverse_frequencies, rotary_cos_sin

LLAMA3 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 128.0, 8192, beta_fast=4.0, beta_slow=1.0)


def exact_angle(position, pair, head_dim, base):
    """position * base^(-2 pair / head_dim) modulo a turn, in 50 digits, as a float in [0, 2 pi)."""
    with decimal.localcontext() as context:
        context.prec = 50
        pi = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        exponent = decimal.Decimal(-2 * pair) / head_dim
        angle = decimal.Decimal(position) * (decimal.Decimal(base).ln() * exponent).exp()
        return float(angle % (2 * pi))


@pytest.mark.parametrize("base", [10_000, 500_000])
@pytest.mark.parametrize("position", [0, 1, 131_071, 9_999_999, 10_000_000])
def test_angles_are_exact_at_ten_million(base, position):
    head_dim = 128
    cos, sin = rotary_cos_sin(torch.tensor([position]), inverse_frequencies(head_dim, base), dtype=torch.float64)
    for pair in range(head_dim // 2):
        got = math.atan2(sin[0, pair].item(), cos[0, pair].item())
        error = (got - exact_angle(position, pair, head_dim, base) + math.pi) % (2 * math.pi) - math.pi
        assert abs(error) < 1e-7, f"pair {pair}: {error} rad"
    cos32, sin32 = rotary_cos_sin(torch.tensor([position]), inverse_frequencies(head_dim, base))
    assert cos32.dtype == sin32.dtype == torch.float32
    assert (cos32 - cos).abs().max() <= 2**-25 and (sin32 - sin).abs().max() <= 2**-25  # rounded once


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-14), (torch.float32, 2e-7), (torch.bfloat16, 3e-3)])
def test_rotation_matches_a_loop_over_pairs(dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64).to(dtype)
    cos, sin = rotary_cos_sin(torch.tensor([0, 1, 7, 8, 1000]), inverse_frequencies(8, 100.0), dtype=torch.float64)
    expected = torch.empty(5, 3, 8, dtype=torch.float64)
    for pair in range(4):
        turned = torch.complex(x[..., pair].double(), x[..., pair + 4].double()) * torch.complex(cos, sin)[:, None, pair]
        expected[..., pair], expected[..., pair + 4] = turned.real, turned.imag
    working = torch.float64 if dtype == torch.float64 else torch.float32
    y = apply_rotary(x, cos.to(working), sin.to(working))
    assert y.dtype == dtype and y.is_contiguous()
    assert ((y.double() - expected).norm() / expected.norm()).item() < tolerance


def test_inverse_is_the_transpose_also_with_a_yarn_factor():
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(4, 2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    cos, sin = rotary_cos_sin(torch.arange(4), inverse_frequencies(6, 50.0), factor=1.3, dtype=torch.float64)
    forward = (apply_rotary(x, cos, sin) * dy).sum()
    backward = (x * apply_rotary(dy, cos, sin, inverse=True)).sum()
    torch.testing.assert_close(forward, backward, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_may_be_a_strided_view_or_the_input(dtype):
    x = torch.randn(6, 4, 8).to(dtype)
    cos, sin = rotary_cos_sin(torch.arange(6), inverse_frequencies(8, 10.0))
    expected = apply_rotary(x, cos, sin)
    send_CTHD = torch.zeros(2, 6, 2, 8, dtype=dtype)  # the layout of an all-to-all: heads of each peer apart
    apply_rotary(x.view(6, 2, 2, 8).transpose(0, 1), cos, sin, out=send_CTHD)
    assert torch.equal(send_CTHD.transpose(0, 1).reshape(6, 4, 8), expected)
    assert apply_rotary(x, cos, sin, out=x) is x
    assert torch.equal(x, expected)


def test_llama3_scaling_in_closed_form():
    """Llama 3.1's own code: one branch per frequency."""
    plain, scaled = inverse_frequencies(128, 500_000.0).tolist(), inverse_frequencies(128, 500_000.0, LLAMA3).tolist()
    branches = set()
    for frequency, got in zip(plain, scaled):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            branch, expected = "kept", frequency
        elif wavelength > 8192 / 1:
            branch, expected = "slowed", frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            branch, expected = "ramp", (1 - smooth) * frequency / 8 + smooth * frequency
        branches.add(branch)
        assert got == pytest.approx(expected, rel=1e-13)
    assert branches == {"kept", "slowed", "ramp"}
    assert attention_factor(LLAMA3) == attention_factor(None) == 1.0


def test_yarn_scaling_in_closed_form():
    plain, scaled = inverse_frequencies(128, 500_000.0).tolist(), inverse_frequencies(128, 500_000.0, YARN).tolist()
    borders = [128 * math.log(8192 / (turns * 2 * math.pi)) / (2 * math.log(500_000.0)) for turns in (4.0, 1.0)]
    low, high = math.floor(borders[0]), math.ceil(borders[1])
    assert 0 < low < high < 63
    for pair, (frequency, got) in enumerate(zip(plain, scaled)):
        gamma = 1.0 if pair <= low else 0.0 if pair >= high else 1 - (pair - low) / (high - low)
        assert got == pytest.approx(frequency / 128 * (1 - gamma) + gamma * frequency, rel=1e-12)
    assert attention_factor(YARN) == pytest.approx(0.1 * math.log(128) + 1)
    assert attention_factor(RopeScaling("yarn", 4.0, 4096, attention_factor=1.5)) == 1.5


@pytest.mark.parametrize("base,head_dim,scaling", [
    (10_000.0, 64, None), (500_000.0, 128, None), (500_000.0, 128, LLAMA3), (500_000.0, 64, RopeScaling("llama3", 32.0, 8192)),
    (500_000.0, 128, YARN), (1_000_000.0, 128, RopeScaling("yarn", 4.0, 32768)), (10_000.0, 32, RopeScaling("yarn", 1.0, 64)),
])
def test_scaling_matches_transformers(base, head_dim, scaling):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if scaling is None:
        expected, factor = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), 1.0
    else:
        names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}[scaling.type]
        settings = {"rope_type": scaling.type, "factor": scaling.factor,
                    "original_max_position_embeddings": scaling.original_max_position_embeddings}
        settings |= {name: getattr(scaling, name) for name in names}
        config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_theta=base,
                             max_position_embeddings=int(scaling.factor * scaling.original_max_position_embeddings),
                             rope_scaling=settings, rope_parameters=settings | {"rope_theta": base})
        expected, factor = ROPE_INIT_FUNCTIONS[scaling.type](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(head_dim, base, scaling), expected.double(), rtol=2e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("bad,named", [
    (lambda: RopeScaling("ntk", 8.0, 8192), "--rope-scaling-type ntk"),
    (lambda: RopeScaling("yarn", 0.5, 8192), "factor 0.5"),
    (lambda: RopeScaling("llama3", 8.0, 8192, low_freq_factor=4.0, high_freq_factor=4.0), "low_freq_factor 4.0"),
    (lambda: inverse_frequencies(127, 1e4), "--kv-channels 127"),
    (lambda: rotary_cos_sin(torch.arange(3), torch.ones(4)), "float64"),
    (lambda: apply_rotary(torch.randn(3, 2, 8), torch.ones(4, 4), torch.ones(4, 4)), r"\[3, 4\] does"),
])
def test_bad_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        bad()
