"""Goes through the cases of a benchmark: one that does not fit the time left is left out, one that fails says why.

    runner = Runner(report, rate=0.4 * ceilings.matmul, time_budget_s=540)
    for case in cases:
        runner.run(case.describe(), flops, lambda: measure(case))        # measure returns (row, parts)

How long a case takes is estimated from its FLOPs: at `rate` for the first one, then at the lowest rate seen in this run.
"""

import gc
import time
from collections.abc import Callable

import torch

from megacp.benchmark.report import Report

SETUP_S = 5.0  # of a case besides its repetitions: memory to pin, kernels to compile


class Runner:
    """`rate`: FLOP/s to expect before anything is measured. `time_budget_s` counts from now; None: no limit."""

    def __init__(self, report: Report, rate: float, time_budget_s: float | None):
        self._report, self._rate, self._budget = report, rate, time_budget_s
        self._start, self._measured = time.monotonic(), False

    def run(self, described: dict, flops: float, measure: Callable[[], tuple[dict, list[dict]]]) -> None:
        """Adds a row. `flops` are those of all repetitions together."""
        expected = SETUP_S + flops / self._rate
        if self._budget is not None and expected > (left := self.left()):
            problem = f"left out: would take about {expected:.0f} s, {max(left, 0):.0f} s are left of --time-budget-s {self._budget:g}"
            self._report.add(described | {"problem": problem})
            return
        start = time.monotonic()
        try:
            row, parts = measure()
        except torch.OutOfMemoryError as error:
            self._report.add(described | {"problem": f"out of GPU memory: {str(error).split('. ')[0]}"})
        except (ValueError, ArithmeticError) as error:  # refused, with the reason; or not finite
            self._report.add(described | {"problem": str(error)})
        else:
            self._report.add(described | row, parts)
            rate = flops / max(time.monotonic() - start - SETUP_S, 1e-3)
            self._rate = min(self._rate, rate) if self._measured else rate
            self._measured = True
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def left(self) -> float:
        """Seconds."""
        return float("inf") if self._budget is None else self._budget - (time.monotonic() - self._start)
