"""The Triton kernels of the head layout: compiled on a GPU, interpreted elsewhere, against float64 and autograd."""

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels.head_layout_triton import pack_heads_triton, unpack_heads_triton  # noqa: E402
from tests.kernels.head_layouts import CASES, EPS, Case, expected, relative_error, tensors  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bf16: one rounding, 2^-9; the interpreter cuts off instead of rounding.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_packed_and_unpacked(case, dtype):
    given = tensors(case, dtype, DEVICE)
    exact = expected(case, given)
    wide = dict(dtype=dtype, device=DEVICE)
    send_CTnD = torch.full((case.groups * case.copies, case.tokens + 9, case.heads, case.head_dim), 7.0, **wide)
    mine = slice(4, 4 + case.tokens)
    pack_heads_triton(given.y_to, send_CTnD[:, mine], case.copies, given.cos_sin, given.norm_D, EPS)
    assert relative_error(send_CTnD[:, mine], exact[0]) < TOLERANCE[dtype]
    assert (send_CTnD[:, :4] == 7).all() and (send_CTnD[:, 4 + case.tokens :] == 7).all()

    all_heads_tGmD = torch.full((case.tokens, case.groups, case.heads + 2, case.head_dim), 7.0, **wide)
    dy_tGnD = all_heads_tGmD[:, :, 1:-1]
    dnorm_D = unpack_heads_triton(given.dx_CtnD, dy_tGnD, case.copies, given.cos_sin, given.y_to, given.norm_D, EPS)
    assert relative_error(dy_tGnD.flatten(1), exact[1]) < TOLERANCE[dtype]
    assert (all_heads_tGmD[:, :, 0] == 7).all() and (all_heads_tGmD[:, :, -1] == 7).all()
    if case.norm:
        assert dnorm_D.dtype == torch.float32 and relative_error(dnorm_D, exact[2]) < 1e-6
    else:
        assert dnorm_D is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_beyond_the_last_leave_no_trace_without_epsilon():
    """Such rows are zeros; with eps = 0 their reciprocal norm is infinite."""
    given = tensors(Case(3, 1, 1, 1, 8, False, True), torch.float32, DEVICE)
    dnorm_D = unpack_heads_triton(given.dx_CtnD, torch.empty(3, 1, 1, 8, device=DEVICE), 1, None, given.y_to, given.norm_D, 0.0)
    assert dnorm_D.isfinite().all()


def test_the_same_inputs_give_the_same_bits():
    given = tensors(Case(300, 2, 2, 3, 16, True, True), torch.bfloat16, DEVICE)
    runs = []
    for _ in range(2):
        dy_tGnD = torch.empty(300, 2, 3, 16, dtype=torch.bfloat16, device=DEVICE)
        runs.append((dy_tGnD, unpack_heads_triton(given.dx_CtnD, dy_tGnD, 2, given.cos_sin, given.y_to, given.norm_D, EPS)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_a_stride_inside_a_head_is_refused():
    with pytest.raises(ValueError, match="stride 2 inside a head"):
        pack_heads_triton(torch.zeros(3, 8, device=DEVICE), torch.zeros(1, 3, 1, 16, device=DEVICE)[..., ::2], 1, None, None, 0.0)
