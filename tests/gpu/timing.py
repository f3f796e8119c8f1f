"""Milliseconds of a call on the GPU alone: what the host takes to launch it, with a busy processor, is not counted."""

import statistics

import torch

CYCLES = 1_000_000  # of the pause before, some 0.5 ms: the host enqueues meanwhile
WARMUP, REPEATS = 3, 20


def median_ms(call) -> float:
    """Caches are cold: 256 MiB are overwritten before."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for repeat in range(WARMUP + REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        torch.cuda._sleep(CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if repeat >= WARMUP:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
