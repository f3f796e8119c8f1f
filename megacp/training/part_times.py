"""Seconds of a step by part: projections, all-to-all, attention, MLP, output head, optimizer.

    with PartTimer(device, optimizer) as timer:
        train_step(...)
        timer.take()                # {"projections": 1.2, "all-to-all": 0.3, ...}; counts anew from here

While the block runs, the functions named in `PARTS` are replaced by timed ones: training code carries no clocks. CUDA events
measure on a GPU, the wall clock on a CPU. Parts do not contain each other; what no part has is copies of heads, the output
projection, gathering and reducing weights, and waiting.
"""

import time
from collections import defaultdict
from functools import partial

import torch

from megacp.planning.work import LAYER_PARTS
from megacp.training import step
from megacp.training.wrapping import wrapped

PARTS = LAYER_PARTS | {"optimizer": [(step, "clip_grad_norm")]}


class PartTimer:
    """A context manager; `optimizer` is the one whose `step` counts."""

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer):
        self._cuda = device.type == "cuda"
        self._targets = [(*target, partial(self._timed, part)) for part, targets in PARTS.items() for target in targets]
        self._targets.append((optimizer, "step", partial(self._timed, "optimizer")))
        self._spans: dict[str, list[tuple]] = defaultdict(list)

    def __enter__(self) -> "PartTimer":
        self._wrapped = wrapped(self._targets)
        self._wrapped.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._wrapped.__exit__(*exception)

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call. Waits for the GPU."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds = {part: sum(self._seconds(*span) for span in self._spans[part]) for part in PARTS}
        self._spans.clear()
        return seconds

    def _timed(self, part: str, original):
        def timed(*args, **kwargs):
            start = self._now()
            result = original(*args, **kwargs)
            self._spans[part].append((start, self._now()))
            return result

        return timed

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start, stop) -> float:
        return start.elapsed_time(stop) / 1000 if self._cuda else stop - start
