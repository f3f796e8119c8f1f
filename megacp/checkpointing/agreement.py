"""Doing something on every rank such that all of them succeed or all of them fail.

    with agreement_group() as group:
        sizes = together(group, lambda: write_my_file())  # [812, 640] on both ranks, or RankFailure on both:
                                                          # "rank 1: OSError: [Errno 28] No space left on device"

A rank that raised alone would leave the others waiting in their next collective.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

PATIENCE = timedelta(hours=2)  # a rank that dies ends the wait at once; this bounds a file system that hangs

T = TypeVar("T")


class RankFailure(RuntimeError):
    """An action failed on some rank; raised on all. The text is that of the first such rank.

    An action may raise it itself with a text that needs no rank and no type before it.
    """


@contextmanager
def agreement_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of all ranks for the time of one save or load; to be entered by all of them.

    Ranks wait here for the slowest disk. On the training's own group such a wait would run into the timeout
    meant for a step, and NCCL would end the job in the middle of a save.
    """
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns the results of all, by rank; they must be picklable and small.

    Raises RankFailure on every rank when the action raised on any.
    """
    cause = result = failure = None
    try:
        result = action()
    except RankFailure as error:  # says already what there is to say
        cause, failure = error, str(error)
    except Exception as error:
        cause, failure = error, f"rank {dist.get_rank(group)}: {describe_error(error)}"
    outcomes = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (failure, result), group=group)
    for failure, _ in outcomes:
        if failure is not None:
            raise RankFailure(failure) from cause
    return [result for _, result in outcomes]


def on_first_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and returns its result on every rank; raises as `together` does."""
    first = dist.get_rank(group) == 0
    return together(group, lambda: action() if first else None)[0]


def describe_error(error: BaseException) -> str:
    """`FileNotFoundError: [Errno 2] No such file or directory: 'x'`."""
    return f"{type(error).__name__}: {error}"
