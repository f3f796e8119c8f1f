"""Seconds of work on a device.

    seconds_of(lambda: layer(h), device)                       # one call, all its work done
    call_seconds(lambda: a @ b, device, repeats=5)             # of short calls: the median of 5 batches, per call

A GPU works behind the host's back and tells of its end late; a batch of calls that lasts `BATCH_S` makes that small.
"""

import statistics
import time
from collections.abc import Callable

import torch

BATCH_S = 0.05
MOST_CALLS = 100


def synchronize(device: torch.device) -> None:
    """Waits for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def call_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """What was compiled and allocated at first should be there: call it once before."""
    calls = min(MOST_CALLS, max(1, round(BATCH_S / max(seconds_of(call, device), 1e-9))))

    def batch() -> None:
        for _ in range(calls):
            call()

    return statistics.median(seconds_of(batch, device) for _ in range(repeats)) / calls
