"""The Triton kernel of the cross-entropy against torch's own in float64: compiled on a GPU, interpreted elsewhere."""

import math

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels import cross_entropy_triton
from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.cross_entropy_triton import cross_entropy_forward_backward_triton_
from tests.kernels.rounding import UNIT, assert_rounded_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = cross_entropy_triton.REPEATS * cross_entropy_triton.LANES * cross_entropy_triton.VECTOR
INF, NAN = math.inf, math.nan


def run(rows, labels, grad_scale=1.0):
    logits = torch.tensor(rows, device=DEVICE)
    loss = cross_entropy_forward_backward_triton_(logits, torch.tensor(labels, device=DEVICE), grad_scale)
    return loss.tolist(), logits.tolist()


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("tokens,vocab", [(1, 2), (10, 37), (3, BLOCK), (4, 2 * BLOCK + 17)])
def test_loss_and_gradient_round_once(tokens, vocab, dtype):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64).mul(5).to(dtype).to(DEVICE)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[1::3] = IGNORE_INDEX
    labels[0] = vocab - 1
    labels = labels.to(DEVICE)
    exact = logits.double().requires_grad_()
    loss64 = torch.nn.functional.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORE_INDEX)
    (loss64.sum() * 0.25).backward()

    loss = cross_entropy_forward_backward_triton_(logits, labels, 0.25)

    assert loss.dtype == torch.float32
    assert_rounded_once(loss, loss64.detach(), 10.0)
    assert_rounded_once(logits, exact.grad, 4 * exact.grad.abs() + 0.25 * 2.0**-6)
    assert not loss[1::3].any() and not logits[1::3].any()


def test_a_flat_row_of_a_large_vocabulary():
    """All logits equal: the loss is ln V and each probability 1/V; a sum in bf16 would stop at 256."""
    vocab = 5 * BLOCK
    logits = torch.full((1, vocab), 3.0, dtype=torch.bfloat16, device=DEVICE)
    loss = cross_entropy_forward_backward_triton_(logits, torch.tensor([7], device=DEVICE), vocab / 64)
    assert loss.item() == pytest.approx(math.log(vocab), rel=1e-6)
    assert logits[0, 0].item() == logits[0, -1].item() == pytest.approx(1 / 64, rel=2**-7)
    assert logits[0, 7].item() == pytest.approx(1 / 64 - vocab / 64, rel=2**-7)


def test_the_maximum_may_come_late_or_early():
    """A running sum is scaled down when a later logit of the lane is higher by a factor that fp32 cannot hold."""
    for place in (0, BLOCK + 5, 3 * BLOCK - 1):
        logits = torch.zeros(1, 3 * BLOCK, device=DEVICE)
        logits[0, place] = 200
        loss = cross_entropy_forward_backward_triton_(logits, torch.tensor([place], device=DEVICE), 1.0)
        assert loss.item() == 0 and logits.abs().max().item() < 1e-30


def test_extreme_logits_and_garbage_in_ignored_rows():
    loss, gradient = run([[1e4, -1e4, 0.0], [NAN, INF, 1.0], [-3e38, 3e38, 0.0]], [1, IGNORE_INDEX, 1])
    assert loss == [2e4, 0.0, 0.0]
    assert gradient == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_logits_of_minus_infinity_have_no_probability():
    (loss,), (gradient,) = run([[-INF, 0.0, 0.0, -INF]], [1])
    assert loss == pytest.approx(math.log(2)) and gradient == pytest.approx([0.0, -0.5, 0.5, 0.0])


@pytest.mark.parametrize("row", [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
def test_logits_that_are_no_numbers_give_a_nan_loss_so_that_training_can_stop(row):
    assert math.isnan(run([row], [1])[0][0])


@pytest.mark.parametrize("label", [3, -1, 2**40])
def test_a_label_outside_the_vocabulary_gives_nan_and_leaves_other_rows_alone(label):
    loss, gradient = run([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [label, 0])
    assert math.isnan(loss[0]) and all(math.isnan(value) for value in gradient[0])
    assert loss[1] == pytest.approx(math.log(3)) and gradient[1] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_rows_with_a_stride_are_overwritten_in_place():
    wide = torch.randn(3, 90, device=DEVICE)
    logits, other, contiguous = wide[:, :50], wide[:, 50:].clone(), wide[:, :50].clone()
    labels = torch.tensor([0, 7, 49], device=DEVICE)
    loss = cross_entropy_forward_backward_triton_(logits, labels, 1.0)
    assert torch.equal(loss, cross_entropy_forward_backward_triton_(contiguous, labels, 1.0))
    assert torch.equal(logits, contiguous) and torch.equal(wide[:, 50:], other)
