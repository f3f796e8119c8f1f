"""The steps between QuACK's products against float64: compiled on a GPU, interpreted elsewhere. The products are made by torch here."""

import math

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.linear_cross_entropy import POWER_WORDS, Scratch, column_tile
from megacp.kernels.linear_cross_entropy_triton import finish_rows
from tests.kernels.rounding import UNIT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first_product(logits_tV, labels_t, y_td, words):
    """Exponentials, and the scratch as the first product leaves it; what it does not write is nan."""
    tokens, vocab = logits_tV.shape
    x_tnw = (logits_tV.double() * math.log2(math.e)).unflatten(1, (-1, words))
    offset_tn = x_tnw.amax(2).round()
    e_tnw = torch.exp2(x_tnw - offset_tn[..., None])
    scratch = Scratch.like(y_td, vocab)
    for name in ("label_logit_t", "scale_t", "power_bt", "scaled_td"):
        getattr(scratch, name).fill_(float("nan"))
    scratch.offset_tn.copy_(offset_tn)
    scratch.sum_tn.copy_(e_tnw.sum(2))
    known = (labels_t >= 0) & (labels_t < vocab)
    scratch.label_logit_t[known] = logits_tV[known, labels_t[known]].float()
    return e_tnw.flatten(1).to(y_td.dtype), scratch


def finish(logits_tV, labels_t, grad_scale, dtype, hidden=24):
    """Losses, dlogits in float64 as the second product sees them and as the third does, and the scaled y with its exact value."""
    words = column_tile(logits_tV.shape[1])
    generator = torch.Generator().manual_seed(2)
    y_td = torch.randn(len(logits_tV), hidden, generator=generator).to(dtype).to(DEVICE)
    e_tV, scratch = first_product(logits_tV, labels_t, y_td, words)
    loss_t = finish_rows(e_tV, y_td, labels_t, grad_scale, scratch, words)
    power_tV = scratch.power_bt.t().double().repeat_interleave(POWER_WORDS, 1)
    dlogits_tV = scratch.scale_t.double()[:, None] * power_tV * e_tV.double()
    return loss_t, dlogits_tV, scratch, y_td


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # QuACK's; and without its rounding. fp16 has not the range
@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("tokens, vocab", [(3, 128), (70, 384), (5, 128 * 70)])  # words of 128 and 192; tiles beyond one block
def test_loss_and_gradient_are_those_of_the_cross_entropy(tokens, vocab, spread, dtype):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64).mul(spread).to(DEVICE).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator).to(DEVICE)
    labels[1::3] = IGNORE_INDEX
    labels[0] = vocab - 1
    exact_t = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
    (exact,) = torch.autograd.grad(exact_t.sum() * 0.3, logits)

    loss, dlogits, scratch, y = finish(logits.detach(), labels, 0.3, dtype)

    assert loss.dtype == torch.float32
    # The label's logit is rounded to fp32, as the products sum it.
    torch.testing.assert_close(loss.double(), exact_t.detach(), rtol=1e-5, atol=2**-22 * logits.abs().max().item())
    torch.testing.assert_close(dlogits, exact, rtol=4 * UNIT[dtype] + 1e-4, atol=0.3 * (1e-30 + 2e-6))
    torch.testing.assert_close(
        scratch.scaled_td.double(), scratch.scale_t.double()[:, None] * y.double(), rtol=2 * UNIT[dtype], atol=0
    )
    assert not loss[1::3].any() and not dlogits[1::3].any() and not scratch.scaled_td[1::3].any()


def test_a_label_far_below_the_maximum_keeps_its_gradient():
    """Its tile lies 2^-140, 2^-300 below the top: a factor that bf16 cannot hold, and what it is to be multiplied with neither."""
    for below in (97.0, 210.0):
        logits = torch.zeros(1, 384, dtype=torch.float64, device=DEVICE)
        logits[0, :192] = -below
        labels = torch.tensor([5], device=DEVICE)
        loss, dlogits, _, _ = finish(logits, labels, 1.0, torch.bfloat16)
        assert loss.item() == pytest.approx(below + math.log(192), rel=1e-6)
        assert dlogits[0, 5].item() == pytest.approx(-1, rel=2**-8)
        assert dlogits[0, 300].item() == pytest.approx(1 / 192, rel=2**-8) and 0 <= dlogits[0, 6].item() < 1e-30


def test_a_label_out_of_range_gives_nan_and_touches_no_other_row():
    for label in (384, -1, 2**40):
        logits = torch.zeros(3, 384, dtype=torch.float64, device=DEVICE)
        loss, dlogits, scratch, _ = finish(logits, torch.tensor([0, label, 7], device=DEVICE), 1.0, torch.bfloat16)
        assert loss.isnan().tolist() == [False, True, False]
        assert dlogits[1].isnan().all() and scratch.scaled_td[1].isnan().all()
        for row, known in ((0, 0), (2, 7)):
            expected = torch.full((384,), 1 / 384, dtype=torch.float64, device=DEVICE)
            expected[known] -= 1
            torch.testing.assert_close(dlogits[row], expected, rtol=2**-8, atol=0)
