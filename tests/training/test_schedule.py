"""A wrong learning rate trains, only worse: nobody would notice without these."""

import doctest
import math

import numpy as np
import pytest
import torch

import megacp.training.schedule
from megacp.training.schedule import learning_rate

RATES = dict(lr=3e-4, min_lr=3e-5, warmup_iters=20, decay_iters=100)
STYLES = ["cosine", "linear", "constant", "WSD"]


def curve(style, steps, **changes):
    return np.array([learning_rate(step, style=style, wsd_decay_iters=16, **RATES | changes) for step in steps])


@pytest.mark.parametrize("style", STYLES)
def test_warms_up_on_a_line_from_zero(style):
    steps = np.arange(21)
    np.testing.assert_allclose(curve(style, steps), 3e-4 * steps / 20, rtol=1e-14)


@pytest.mark.parametrize("style", STYLES)
def test_without_warm_up_the_first_update_is_near_the_largest_rate(style):
    assert curve(style, [1], warmup_iters=0)[0] == pytest.approx(3e-4, rel=0.02)


def test_linear_is_the_line_between_its_ends():
    steps = np.arange(20, 140)
    np.testing.assert_allclose(curve("linear", steps), np.interp(steps, [20, 100], [3e-4, 3e-5]), rtol=1e-12)


def test_cosine_is_torchs():
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80, eta_min=3e-5)
    for step in range(20, 101):
        assert learning_rate(step, style="cosine", **RATES) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_wsd_stays_then_halves_exponentially():
    assert set(curve("WSD", range(20, 85))) == {3e-4}
    steps = np.arange(84, 101)
    excess = 2 * np.exp(-math.log(2) * (steps - 84) / 16) - 1
    np.testing.assert_allclose(curve("WSD", steps), 3e-5 + excess * (3e-4 - 3e-5), rtol=1e-12)


def test_wsd_may_decay_from_the_end_of_the_warm_up():
    values = curve("WSD", range(20, 101), warmup_iters=84)
    assert values.max() == 3e-4 and values[-1] == 3e-5


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_after_the_decay_it_stays_at_the_smallest_rate(style):
    assert set(curve(style, [100, 101, 10_000])) == {3e-5}
    after_warm_up = curve(style, range(20, 101))
    assert (np.diff(after_warm_up) <= 0).all()


def test_constant_never_decays():
    assert set(curve("constant", [20, 100, 10_000])) == {3e-4}


def test_unknown_style_is_refused():
    with pytest.raises(ValueError, match="--lr-decay-style triangle"):
        curve("triangle", [50])


def test_docstring_examples_are_true():
    assert doctest.testmod(megacp.training.schedule).failed == 0
