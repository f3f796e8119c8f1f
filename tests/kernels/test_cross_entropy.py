"""Cross-entropy against torch's own in float64, over chunk borders, ignored rows and extreme logits."""

import math

import pytest
import torch

from megacp.kernels import cross_entropy
from megacp.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_forward_backward_

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows_per_buffer", [1, 3, 100])
def test_loss_and_gradient_match_float64(dtype, rows_per_buffer, monkeypatch):
    tokens, vocab, grad_scale = 10, 37, 0.25
    monkeypatch.setattr(cross_entropy, "BUFFER_ELEMENTS", rows_per_buffer * vocab)
    generator = torch.Generator().manual_seed(2)
    logits = (5 * torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[[0, 4, 9]] = IGNORE_INDEX
    exact = logits.double().requires_grad_()
    loss64 = torch.nn.functional.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORE_INDEX)
    (loss64.sum() * grad_scale).backward()

    storage = logits.data_ptr()
    loss = cross_entropy_forward_backward_(logits, labels, grad_scale)

    assert logits.data_ptr() == storage and logits.dtype == dtype
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exactness = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(loss.double(), loss64.detach(), rtol=exactness, atol=exactness)
    assert ((logits.double() - exact.grad).norm() / exact.grad.norm()).item() < TOLERANCE[dtype]
    assert loss[[0, 4, 9]].tolist() == [0, 0, 0] and not logits[[0, 4, 9]].any()


def test_extreme_logits_and_garbage_in_ignored_rows():
    logits = torch.tensor([[1e4, -1e4, 0.0], [math.nan, math.inf, 1.0], [-3e38, 3e38, 0.0]])
    loss = cross_entropy_forward_backward_(logits, torch.tensor([1, IGNORE_INDEX, 1]), 1.0)
    assert loss.tolist() == [2e4, 0.0, 0.0]
    assert logits.tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_nan_logits_give_a_nan_loss_so_that_training_can_stop():
    loss = cross_entropy_forward_backward_(torch.tensor([[math.nan, 1.0]]), torch.tensor([1]), 1.0)
    assert math.isnan(loss.item())


def test_all_rows_ignored_and_no_rows_at_all():
    logits = torch.randn(4, 5)
    assert cross_entropy_forward_backward_(logits, torch.full((4,), IGNORE_INDEX), 1.0).tolist() == [0] * 4
    assert not logits.any()
    assert cross_entropy_forward_backward_(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 1.0).shape == (0,)


def test_a_strided_view_of_logits_is_overwritten_in_place():
    wide = torch.randn(3, 12)
    other_half = wide[:, 6:].clone()
    contiguous = wide[:, :6].clone()
    cross_entropy_forward_backward_(wide[:, :6], torch.tensor([0, 1, 2]), 1.0)
    cross_entropy_forward_backward_(contiguous, torch.tensor([0, 1, 2]), 1.0)
    torch.testing.assert_close(wide[:, :6], contiguous)
    assert torch.equal(wide[:, 6:], other_half)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\[3, 5\] and \[4\]"):
        cross_entropy_forward_backward_(torch.randn(3, 5), torch.zeros(4, dtype=torch.int64), 1.0)
