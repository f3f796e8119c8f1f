"""Signals make every rank stop after the same step; broken numbers are reported with their place in the data."""

import math
import os
import signal

import pytest
import torch.distributed as dist

from megacp.training import resilience
from megacp.training.resilience import NonFiniteError, TerminationSignal, check_finite
from tests.distributed import run_distributed


def steps_until_a_signal(rank, world_size, number):
    """Only the last rank gets the signal, in step 3."""
    with TerminationSignal() as termination:
        for step in range(10):
            if step == 3 and rank == world_size - 1:
                os.kill(os.getpid(), number)
            if termination.received():
                break
    return step, termination.name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_stop_after_the_same_step(number):
    results = run_distributed(steps_until_a_signal, 3, int(number))
    assert [step for step, _ in results] == [3, 3, 3]
    assert [name for _, name in results] == [None, None, number.name]


def steps_until_the_time_is_up(rank, world_size, signalled):
    """The last rank's time is up in step 3; rank 0 gets a signal in the same step, if any."""
    deadline = 100.0 if rank == world_size - 1 else math.inf
    with pytest.MonkeyPatch.context() as patch, TerminationSignal(deadline, "--exit-duration-in-mins 1") as termination:
        for step in range(10):
            patch.setattr(resilience.time, "monotonic", lambda step=step: 100.0 if step >= 3 else 99.9)
            if signalled and step == 3 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if termination.received():
                break
    return step, termination.reason


def test_all_ranks_stop_after_the_step_in_which_the_time_of_one_is_up_and_tell_why():
    assert run_distributed(steps_until_the_time_is_up, 3, False) == [(3, "--exit-duration-in-mins 1")] * 3
    stopped = run_distributed(steps_until_the_time_is_up, 3, True)
    assert stopped == [(3, "SIGTERM"), *[(3, "a signal on another rank")] * 2]


def signal_outside_the_group(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with TerminationSignal() as termination:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return termination.received(pairs[rank // 2])


def test_the_group_that_is_asked_answers():
    assert run_distributed(signal_outside_the_group, 4) == [False, False, True, True]


def test_handlers_are_put_back():
    former = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), TerminationSignal():
        assert signal.getsignal(signal.SIGTERM) != former[0]
        1 / 0  # noqa: B018
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former


def test_second_ctrl_c_stops_at_once_but_the_one_torchrun_hands_on_does_not(monkeypatch):
    with TerminationSignal() as termination:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert termination.name == "SIGINT"
        monkeypatch.setattr(resilience, "REPEAT_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_finite_numbers_pass():
    check_finite(2.5, 0.0, 3, 96, range(96, 104))


@pytest.mark.parametrize(
    ("loss", "grad_norm", "what"),
    [
        (math.nan, 1.0, "loss is nan at"),
        (2.0, math.inf, "grad norm is inf at"),
        (-math.inf, math.nan, "loss is -inf and grad norm is nan at"),
    ],
)
def test_broken_numbers_name_step_and_samples(loss, grad_norm, what):
    with pytest.raises(NonFiniteError) as error:
        check_finite(loss, grad_norm, 12, 96, [96, 97, 98, 101, 103, 104])
    for part in (what, "step 12", "consumed samples 96", "96-98, 101, 103-104", "--lr", "--load"):
        assert part in str(error.value)
