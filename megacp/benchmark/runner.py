"""Goes through the cases of a benchmark: one that does not fit the time left is left out, one that fails says why.

    runner = Runner(report, rate=0.3 * ceilings.matmul, time_budget_s=540, start=time.monotonic())
    for case in cases:
        runner.run(case.describe(), case.model_flops, repetitions=5, measure=lambda: measure(case))     # returns (row, parts)

How long a case takes is estimated from the last one that differs in nothing but its length: its FLOPs per second, and what it took
besides its repetitions. The first of a kind is expected to run at `rate`.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.benchmark.report import Report

SETUP_S = 5.0  # of a case besides its repetitions, before one is measured: memory to pin, kernels to compile
LENGTHS = ("seq_length", "tokens")  # keys of a row


@dataclass
class Pace:
    rate: float  # FLOP/s
    besides_s: float = SETUP_S


class Runner:
    """`rate`: FLOP/s to expect before anything is measured. `time_budget_s`, or None, counts from `start`, a time.monotonic."""

    def __init__(self, report: Report, rate: float, time_budget_s: float | None, start: float):
        self.report = report
        self._rate, self._budget, self._start = rate, time_budget_s, start
        self._paces: dict[tuple, Pace] = {}

    def run(self, described: dict, flops: float, repetitions: int, measure: Callable[[], tuple[dict, list[dict]]]) -> None:
        """Adds a row. `flops` of one repetition, whose time `measure` returns as `seconds`."""
        kind = tuple(item for item in described.items() if item[0] not in LENGTHS)
        pace = self._paces.get(kind, Pace(self._rate))
        expected, left = pace.besides_s + repetitions * flops / pace.rate, self.left()
        if expected > left:
            left_text = f"{max(left, 0):.0f} s are left of --time-budget-s {self._budget:g}"
            self.report.add(described | {"problem": f"left out: would take about {expected:.0f} s, {left_text}"})
            return
        start = time.monotonic()
        try:
            row, parts = measure()
        except torch.OutOfMemoryError as error:
            self.report.add(described | {"problem": f"out of GPU memory: {str(error).split('. ')[0]}"})
        except (ValueError, ArithmeticError) as error:  # refused, with the reason; or not finite
            self.report.add(described | {"problem": str(error)})
        else:
            self.report.add(described | row, parts)
            besides = time.monotonic() - start - repetitions * row["seconds"]
            self._paces[kind] = Pace(flops / row["seconds"], max(besides, 0.0))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def left(self) -> float:
        """Seconds of the budget."""
        return float("inf") if self._budget is None else self._budget - (time.monotonic() - self._start)
