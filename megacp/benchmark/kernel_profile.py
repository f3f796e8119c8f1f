"""Which kernels ran in a phase, from torch's profiler.

    profile = KernelProfile(device)
    with profile("forward"):
        ...; torch.cuda.synchronize()
    profile.phases["forward"].spans             # [Span("nvjet_…", 12.001, 12.002), …]
    profile.phases["forward"].wall_s            # from begin to end of the block

On a GPU only kernels and copies are recorded, not what the host does, which would slow it. On a CPU operators are: the outermost
that has a class of its own, else the innermost, so that no moment counts twice. There the engine's calls of attention are named,
for that of a query chunk is plain matrix products on a CPU.
"""

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megacp.benchmark.kernel_classes import ATTENTION_RANGE, ELEMENTWISE, Span, kernel_class
from megacp.planning.work import LAYER_PARTS
from megacp.training.wrapping import wrapped

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Phase:
    spans: list[Span]
    wall_s: float


class KernelProfile:
    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.phases: dict[str, Phase] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Profiles the block, which ends when all its work on the device is done."""
        activity = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
        named = [] if self._cuda else [(*call, _named) for call in LAYER_PARTS["attention"]]
        with wrapped(named), profile(activities=[activity]) as profiler:
            start = time.perf_counter()
            yield
            wall_s = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        self.phases[name] = Phase(spans_of(events), wall_s)


def _named(attention: Callable) -> Callable:
    @functools.wraps(attention)
    def named(*args, **kwargs):
        with record_function(ATTENTION_RANGE):
            return attention(*args, **kwargs)

    return named


def spans_of(events: list[dict]) -> list[Span]:
    """Spans of a Chrome trace: its GPU's when there are any, else the CPU's operators."""
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") in GPU_CATEGORIES]
    if kernels:
        return [_span(event) for event in kernels]
    threads = defaultdict(list)
    for event in complete:
        if event.get("cat") == "cpu_op" or event["name"] == ATTENTION_RANGE:
            threads[event["pid"], event["tid"]].append(event)
    return [span for thread in threads.values() for span in _operators(thread)]


def _operators(events: list[dict]) -> Iterator[Span]:
    """Of one thread. Operators contain those that they call."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    covered = 0.0
    for event, following in zip(events, [*events[1:], None]):
        stop = event["ts"] + event["dur"]
        if event["ts"] < covered:
            continue
        is_leaf = following is None or following["ts"] >= stop
        if is_leaf or kernel_class(event["name"], on_cpu=True) != ELEMENTWISE:
            yield _span(event, on_cpu=True)
            covered = stop


def _span(event: dict, on_cpu: bool = False) -> Span:
    start, bytes_ = event["ts"] * MICROSECOND, event.get("args", {}).get("bytes", 0)
    return Span(event["name"], start, start + event["dur"] * MICROSECOND, int(bytes_), on_cpu)
