"""Stopping well: on a signal from the scheduler, when the time is up, and on numbers that are no longer numbers.

    with TerminationSignal(deadline=started + 3600, flag="--exit-duration-in-mins 60") as termination:
        for step in range(first_step, train_iters):
            loss, grad_norm = train_step()
            check_finite(loss, grad_norm, step, consumed_samples, sample_indices)
            if termination.received(group):  # the same answer on every rank
                save_checkpoint(...)
                print(termination.reason)  # "SIGTERM", "a signal on another rank", "--exit-duration-in-mins 60"
                break

A signal reaches the ranks at different moments, some perhaps one step later than others, and their clocks differ. `received`
asks all of them, so that all leave the loop, and save, after the same step.
"""

import math
import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

# torchrun hands a terminal's Ctrl-C on to its workers, which got it already: the second of a pair is no new wish.
REPEAT_SECONDS = 2.0
OVERDUE, SIGNALLED = 1, 2  # what counts when ranks have different causes: the highest


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite."""


class CollectiveTimeout(RuntimeError):
    """Another rank did not come to a collective in time."""


class TerminationSignal:
    """Remembers SIGTERM and SIGINT while its `with` block runs, and puts the former handlers back at its end.

    The first signal only sets a flag, and the step in progress goes on. A SIGINT (Ctrl-C) REPEAT_SECONDS or
    more after the first raises KeyboardInterrupt at once, for someone who does not want to wait for the step.
    The block must be entered in the main thread, as Python's signal handlers demand.

    `deadline`: a time of time.monotonic() that counts as a signal once it has passed; `flag` is what set it.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, deadline: float = math.inf, flag: str = ""):
        self.name: str | None = None  # of the signal this rank got first, such as "SIGTERM"
        self.reason = ""  # why `received` was true
        self._deadline, self._flag = deadline, flag

    def __enter__(self) -> "TerminationSignal":
        self._former = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            self._first_time = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_time >= REPEAT_SECONDS:
            raise KeyboardInterrupt

    def received(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank of `group` (None: all ranks) got a signal or is past its deadline; one all-reduce, by every rank."""
        own = SIGNALLED if self.name is not None else OVERDUE if time.monotonic() >= self._deadline else 0
        cause = highest_of_ranks(own, group)
        if cause:
            self.reason = (self.name or "a signal on another rank") if cause == SIGNALLED else self._flag
        return cause > 0


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on any rank of `group` (None: all ranks); one all-reduce of one number, by every rank."""
    return highest_of_ranks(int(flag), group) > 0


def highest_of_ranks(number: int, group: dist.ProcessGroup | None = None) -> int:
    """The same on all ranks of `group` (None: all ranks); one all-reduce of one number, by every rank."""
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    highest = torch.tensor(number, dtype=torch.int32, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest.item()


def check_finite(loss: float, grad_norm: float, step: int, consumed_samples: int, sample_indices: Sequence[int]) -> None:
    """Raises NonFiniteError, naming the step and its place in the data, unless both numbers are finite.

    loss, grad_norm: of the whole step, equal on all ranks, so that all of them raise or none does.
    consumed_samples: samples used before this step. sample_indices: the global sample indices of this step.
    Call it before the optimizer's step, so that the weights in memory are still good.
    """
    numbers = {"loss": loss, "grad norm": grad_norm}
    broken = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if broken:
        raise NonFiniteError(
            f"{' and '.join(broken)} at step {step} (consumed samples {consumed_samples}, sample indices "
            f"{ranges_text(sample_indices)}). The step was not applied. To go on, --load the last checkpoint with a lower "
            "--lr, a longer --lr-warmup-iters or a smaller --clip-grad; if it happens again at the same samples, "
            "look at those documents"
        )


def ranges_text(indices: Sequence[int]) -> str:
    """`[4, 5, 6, 9]` is "4-6, 9"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
