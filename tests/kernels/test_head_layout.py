"""The heads' way to the all-to-all layout and back, plain torch against float64 and autograd."""

import pytest
import torch

from megacp.kernels.head_layout import pack_heads, unpack_heads
from tests.kernels.head_layouts import CASES, EPS, Case, expected, relative_error, tensors

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}  # bf16: three roundings of 2^-9


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_packed_and_unpacked(case, dtype):
    given = tensors(case, dtype)
    exact = expected(case, given)
    send_CTnD = torch.full((case.groups * case.copies, case.tokens + 9, case.heads, case.head_dim), 7.0, dtype=dtype)
    pack_heads(given.y_to, send_CTnD[:, 4 : 4 + case.tokens], case.copies, given.cos_sin, given.norm_D, EPS)
    assert relative_error(send_CTnD[:, 4 : 4 + case.tokens], exact[0]) < TOLERANCE[dtype]
    assert (send_CTnD[:, :4] == 7).all() and (send_CTnD[:, 4 + case.tokens :] == 7).all()

    y_to = given.y_to if case.norm else None
    dy_to, dnorm_D = unpack_heads(given.dx_CtnD, case.copies, given.cos_sin, y_to, given.norm_D, EPS)
    assert dy_to.is_contiguous() and dy_to.dtype == dtype
    assert relative_error(dy_to, exact[1]) < TOLERANCE[dtype]
    if case.norm:
        assert dnorm_D.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(dnorm_D, exact[2]) < TOLERANCE[dtype]
    else:
        assert dnorm_D is None


def test_the_output_may_be_a_slice_of_all_heads():
    """Stages of one head for each of two ranks go to their places among the rank's three heads."""
    natural_tCnD = torch.randn(4, 2, 3, 8)
    gathered = torch.empty_like(natural_tCnD)
    for head in range(3):
        stage_CtnD = natural_tCnD[:, :, head : head + 1].transpose(0, 1).contiguous()
        out = gathered[:, :, head : head + 1]
        assert unpack_heads(stage_CtnD, 1, out=out)[0] is out
    assert torch.equal(gathered, natural_tCnD)


def test_inputs_are_left_alone():
    given = tensors(Case(7, 2, 2, 1, 8, True, True), torch.float32)
    copies = [x.clone() for x in (given.y_to, *given.cos_sin, given.norm_D, given.dx_CtnD)]
    pack_heads(given.y_to, torch.empty(4, 7, 1, 8), 2, given.cos_sin, given.norm_D, EPS)
    unpack_heads(given.dx_CtnD, 2, given.cos_sin, given.y_to, given.norm_D, EPS)
    for kept, now in zip(copies, (given.y_to, *given.cos_sin, given.norm_D, given.dx_CtnD)):
        assert torch.equal(kept, now)


def test_copies_are_summed_in_fp32():
    """1 + 2^-9 + ... of 64 blocks: in bf16 every addend after the first would be lost."""
    dx_CtnD = torch.full((65, 1, 1, 2), 2.0**-9, dtype=torch.bfloat16)
    dx_CtnD[0] = 1
    assert unpack_heads(dx_CtnD, 65)[0].tolist() == [[1.125, 1.125]]


def test_misfits_say_what_fits():
    with pytest.raises(ValueError, match=r"\[5, 24\] does"):
        pack_heads(torch.zeros(5, 48), torch.zeros(4, 5, 3, 4), 2)
    with pytest.raises(ValueError, match=r"\[5, 2, 3, 4\] does"):
        unpack_heads(torch.zeros(4, 5, 3, 4), 2, out=torch.zeros(5, 4, 3, 4))


def test_empty_shard():
    pack_heads(torch.empty(0, 8), torch.empty(2, 0, 1, 4), 1)
    dy_to, dnorm_D = unpack_heads(torch.empty(2, 0, 1, 4), 1, None, torch.empty(0, 8), torch.ones(4), EPS)
    assert dy_to.shape == (0, 8) and dnorm_D.tolist() == [0, 0, 0, 0]
