"""Packing and unpacking of heads on a GPU: at the sizes of Llama3-8B on 8 ranks against float64, past 2^31 elements, and how fast.

    python -m pytest -s tests/gpu/test_head_layout_gpu.py -k copy     prints the speeds
"""

import pytest
import torch

from megacp.kernels.head_layout import pack_heads, unpack_heads
from megacp.kernels.rotary import inverse_frequencies, rotary_cos_sin
from tests.gpu.timing import median_ms
from tests.kernels.head_layouts import EPS, Case, expected, relative_error, tensors

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
TOKENS = 8192  # of a tile
ONE_ROUNDING = 4e-3  # bf16: 2^-9


@pytest.fixture(autouse=True)
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rotate, norm", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("groups, copies, heads", [(8, 1, 1), (8, 1, 4), (4, 2, 1)])
def test_a_tile_matches_float64(groups, copies, heads, rotate, norm):
    case = Case(TOKENS - 3, groups, copies, heads, 128, rotate, norm)
    given = tensors(case, torch.bfloat16, "cuda")
    packed_CtnD, dy_to, dnorm_D = expected(case, given)
    send_CtnD = torch.empty_like(given.dx_CtnD)
    pack_heads(given.y_to, send_CtnD, copies, given.cos_sin, given.norm_D, EPS)
    assert relative_error(send_CtnD, packed_CtnD) < ONE_ROUNDING
    y_to = given.y_to if norm else None
    ours_to, ours_D = unpack_heads(given.dx_CtnD, copies, given.cos_sin, y_to, given.norm_D, EPS)
    assert relative_error(ours_to, dy_to) < ONE_ROUNDING
    assert not norm or relative_error(ours_D, dnorm_D) < 1e-5


def assert_repeats(whole, few):
    """`whole [.., r·8, ..]` is `few [8, ..]` again and again, bit for bit, along the tokens (dimension -3)."""
    parts = whole.unflatten(-3, (-1, 8))
    assert torch.equal(parts.amax(-4), few) and torch.equal(parts.amin(-4), few)


@pytest.mark.parametrize("norm", [False, True])
def test_more_than_2_to_the_31_elements(norm):
    """The GEMM's matrix and the send buffer are both longer; every eight tokens repeat."""
    repeats = 2**18 + 1
    few_to = torch.randn(8, 8 * 128, device=DEVICE).to(torch.bfloat16)
    y_to = few_to.repeat(repeats, 1)
    assert y_to.numel() > 2**31
    norm_D = torch.randn(128, device=DEVICE).to(torch.bfloat16) if norm else None
    few_cos_sin = rotary_cos_sin(torch.arange(8, device=DEVICE), inverse_frequencies(128, 1e4, device=DEVICE))
    cos_sin = tuple(x.repeat(repeats, 1) for x in few_cos_sin)

    send_CtnD, few_CtnD = (torch.empty(8, len(y), 1, 128, dtype=torch.bfloat16, device=DEVICE) for y in (y_to, few_to))
    pack_heads(y_to, send_CtnD, 1, cos_sin, norm_D, EPS)
    pack_heads(few_to, few_CtnD, 1, few_cos_sin, norm_D, EPS)
    assert_repeats(send_CtnD, few_CtnD)

    dy_to, dnorm_D = unpack_heads(send_CtnD, 1, cos_sin, y_to if norm else None, norm_D, EPS)
    few_dy_to, few_dnorm_D = unpack_heads(few_CtnD, 1, few_cos_sin, few_to if norm else None, norm_D, EPS)
    assert_repeats(dy_to.unflatten(1, (8, 128)), few_dy_to.unflatten(1, (8, 128)))
    if norm:
        torch.testing.assert_close(dnorm_D / repeats, few_dnorm_D, rtol=1e-4, atol=1e-4)


def test_a_tile_behind_2_to_the_31_elements_of_each_block():
    """Two blocks of 2^31 elements and more: strides that need 64 bits."""
    send_CTnD = torch.zeros(2, 2**24 + 64, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    tile_CtnD, few_CtnD = send_CTnD[:, -32:], torch.empty(2, 32, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    y_to = torch.randn(32, 2 * 128, device=DEVICE).to(torch.bfloat16)
    pack_heads(y_to, tile_CtnD, 1)
    pack_heads(y_to, few_CtnD, 1)
    assert torch.equal(tile_CtnD, few_CtnD)
    assert (send_CTnD[:, :-32].flatten(1).amax(1) == 0).all() and (send_CTnD[:, :-32].flatten(1).amin(1) == 0).all()
    assert torch.equal(unpack_heads(tile_CtnD, 1)[0], y_to)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_half_as_fast_as_a_copy_and_more(heads):
    """At least half the rate of a device copy, counting each byte read or written once. Caches are cold.

    The norm's way back also sums its weight's gradient, which is not counted: a third is its measure.
    """
    case = Case(TOKENS, 8, 1, heads, 128, True, True)
    given = tensors(case, torch.bfloat16, "cuda")
    send_CtnD, copy_to, out = torch.empty_like(given.dx_CtnD), torch.empty_like(given.y_to), torch.empty_like(given.y_to)
    out_tGnD = out.view(TOKENS, 8, heads, 128)
    once = given.y_to.nbytes
    angles = sum(x.nbytes for x in given.cos_sin)
    rate = 2 * once / median_ms(lambda: copy_to.copy_(given.y_to))
    calls = {
        "move": (2 * once, lambda: pack_heads(given.y_to, send_CtnD, 1)),
        "rope, move": (2 * once + angles, lambda: pack_heads(given.y_to, send_CtnD, 1, given.cos_sin)),
        "norm, rope, move": (2 * once + angles, lambda: pack_heads(given.y_to, send_CtnD, 1, given.cos_sin, given.norm_D, EPS)),
        "move back": (2 * once, lambda: unpack_heads(given.dx_CtnD, 1, out=out_tGnD)),
        "rope, move back": (2 * once + angles, lambda: unpack_heads(given.dx_CtnD, 1, given.cos_sin, out=out_tGnD)),
        "norm, rope, move back": (3 * once + angles, lambda: unpack_heads(
            given.dx_CtnD, 1, given.cos_sin, given.y_to, given.norm_D, EPS, out_tGnD)),
    }  # fmt: skip
    shares = {name: size / median_ms(call) / rate for name, (size, call) in calls.items()}
    print(f"\n{heads} heads x 8 ranks, {TOKENS} tokens; device copy {rate / 1e9:.2f} TB/s")
    for name, share in shares.items():
        print(f"  {name:24s}{share:6.0%} of the copy's rate")
    assert shares.pop("norm, rope, move back") > 0.33, shares
    assert min(shares.values()) > 0.5, shares
