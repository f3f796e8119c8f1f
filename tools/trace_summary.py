#!/usr/bin/env python3
"""Where the time of profiled steps went: computing, waiting for communication, waiting for copies, or nothing.

    python tools/trace_summary.py runs/rank0-steps10-11.1764451234.pt.trace.json.gz
    python tools/trace_summary.py runs/rank*.pt.trace.json.gz --json

    runs/rank0-…: rank 0, 2 steps, ms a step
    phase               total         compute  exposed all-to-all  other exposed comm      exposed copies            idle
    forward          1,234.50   1,199.00  97.0%       9.20   0.7%        3.10   0.3%       4.90   0.4%      18.30   1.5%
    head                …
    step                …

    kernels              busy   share of step
    attention          900.10               45.2%
    …

Reads the Chrome traces of pretrain_llama.py --profile, and other ones of torch's profiler, with less to tell apart.

Compute is the time in which at least one kernel ran that does not communicate; communication (NCCL kernels) is exposed while no
other kernel runs, a copy between host and device while neither does; idle is the rest. So a row adds up. All-to-alls are those of
heads; the other communication gathers weights and reduces gradients, and counts while no all-to-all runs either. Copies within the
device and memsets are compute. A kernel belongs to the phase that launched it, and a phase lasts on the GPU from its first computing
kernel, or from the end of what came before, to the next phase's begin: the rows add up to the step. A trace without a GPU is told
by its CPU operators, collectives of gloo as communication.
"""

import argparse
import bisect
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from megacp.benchmark.kernel_classes import COLLECTIVES, HOST_COPIES, kernel_class

PHASES = ("forward", "head", "backward", "optimizer")
OTHER, BETWEEN = "other", "between steps"  # of a step but in no phase; outside the steps
COLUMNS = {
    "compute": "compute", "all_to_all": "exposed all-to-all", "comm": "other exposed comm", "copy": "exposed copies", "idle": "idle",
}  # fmt: skip
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_COLLECTIVE = r"gloo:|c10d::"
ALL_TO_ALL = r"(?i)sendrecv|all_?to_?all"  # NCCL's, gloo's and c10d's names
KINDS = {COLLECTIVES: "comm", HOST_COPIES: "copy"}  # of classes of kernels; the others compute

Intervals = list[tuple[float, float]]  # disjoint and ascending, none empty; microseconds


# ----------------------------------------------------------------------------------------------------------- intervals


def union(intervals) -> Intervals:
    """All points of any of `intervals`, given in any order.

    >>> union([(5, 7), (1, 3), (2, 4), (4, 5), (9, 9)])
    [(1, 7)]
    """
    merged = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The points of `a` that are not in `b`.

    >>> subtract([(0, 10), (20, 30)], [(2, 4), (8, 22)])
    [(0, 2), (4, 8), (22, 30)]
    """
    rest, at = [], 0
    for start, stop in a:
        while at < len(b) and b[at][1] <= start:
            at += 1
        here = at
        while here < len(b) and b[here][0] < stop:
            if b[here][0] > start:
                rest.append((start, b[here][0]))
            start = b[here][1]
            here += 1
        if start < stop:
            rest.append((start, stop))
    return rest


def length_within(a: Intervals, start: float, stop: float) -> float:
    """How much of `[start, stop)`, start <= stop, is in `a`.

    >>> length_within([(0, 10), (20, 30)], 5, 22)
    7
    """
    first = bisect.bisect_right(a, start, key=lambda interval: interval[1])
    total = 0
    for begin, end in a[first:]:
        if begin >= stop:
            break
        total += min(end, stop) - max(begin, start)
    return total


# --------------------------------------------------------------------------------------------------------------- trace


@dataclass(frozen=True)
class Work:
    """Something that a device did; `launch`: when the host asked for it."""

    start: float
    stop: float
    launch: float
    kind: str  # "compute", "all_to_all", "comm" or "copy"
    kernel_class: str  # one of megacp.benchmark.kernel_classes


@dataclass(frozen=True)
class Segment:
    """A stretch of the host's time that belongs to one phase."""

    start: float
    phase: str


@dataclass
class Trace:
    name: str
    rank: int | None
    has_gpu: bool
    work: list[Work]
    segments: list[Segment]  # ascending; the first begins with the first step, the last is after the last step
    steps: int


def read_trace(path: str | Path) -> Trace:
    """Raises ValueError naming the file when it is no Chrome trace, or holds nothing that ran."""
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        work, segments, steps, has_gpu = _contents([event for event in content["traceEvents"] if event.get("ph") == "X"])
        rank = content.get("distributedInfo", {}).get("rank")
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole Chrome trace ({type(error).__name__}: {error}); the files of --profile are") from None
    if not work:
        raise ValueError(f"{path}: no kernel and no operator ran in it; a trace of a step that was recorded to its end has them")
    return Trace(str(path), rank, has_gpu, work, segments, steps)


def _contents(complete: list[dict]) -> tuple[list[Work], list[Segment], int, bool]:
    """Work, segments, steps of a trace's events that have a duration, and whether a GPU did the work; no work, no segments."""
    work = device_work(complete)
    has_gpu = bool(work)
    work = work or operators(complete)
    if not work:
        return [], [], 0, False
    segments, steps = host_segments([event for event in complete if event.get("cat") == "user_annotation"], work)
    return work, segments, steps, has_gpu


def device_work(events: list[dict]) -> list[Work]:
    launches = {}
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
    work = []
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            launch = launches.get(event.get("args", {}).get("correlation"), event["ts"])
            work.append(_work(event, min(launch, event["ts"]), kernel_class(event["name"])))
    return work


def operators(events: list[dict]) -> list[Work]:
    """What ran on the CPU: PyTorch's own operators and collectives."""
    work = []
    for event in events:
        if re.match(CPU_COLLECTIVE, event["name"]):
            work.append(_work(event, event["ts"], COLLECTIVES))
        elif event["name"].startswith("aten::"):
            work.append(_work(event, event["ts"], kernel_class(event["name"], on_cpu=True)))
    return work


def _work(event: dict, launch: float, class_: str) -> Work:
    kind = KINDS.get(class_, "compute")
    if kind == "comm" and re.search(ALL_TO_ALL, event["name"]):
        kind = "all_to_all"
    return Work(event["ts"], event["ts"] + event.get("dur", 0), launch, kind, class_)


def host_segments(annotations: list[dict], work: list[Work]) -> tuple[list[Segment], int]:
    """The host's time cut at the borders of steps and phases, the innermost phase counting; and the number of steps.

    Without named steps the profiler's own are taken, and without these the whole trace is one.
    """
    steps = [event for event in annotations if re.fullmatch(r"step \d+", event["name"])]
    steps = steps or [event for event in annotations if re.fullmatch(r"ProfilerStep#\d+", event["name"])]
    if not steps:
        begin = min(w.launch for w in work)
        steps = [{"ts": begin, "dur": max(w.stop for w in work) - begin}]
    spans = [(event["ts"], event["ts"] + event["dur"], OTHER) for event in steps]
    spans += [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in annotations if event["name"] in PHASES]
    borders = []
    for start, stop, phase in spans:
        borders += [(start, 1, start - stop, phase), (stop, 0, 0.0, phase)]  # ends first, then the longest begin
    open_phases, segments = [], []
    for time, is_begin, _, phase in sorted(borders):
        if is_begin:
            open_phases.append(phase)
        else:
            open_phases.reverse()
            open_phases.remove(phase)  # the innermost of that name
            open_phases.reverse()
        now = open_phases[-1] if open_phases else BETWEEN
        if segments and segments[-1].start == time:
            segments.pop()
        if not segments or segments[-1].phase != now:
            segments.append(Segment(time, now))
    return segments, len(steps)


# ------------------------------------------------------------------------------------------------------------- summary


@dataclass
class Summary:
    """Microseconds a step. `phases`: by phase, the parts of its time by the keys of `COLUMNS`; `kernels`: busy time by class."""

    trace: str
    rank: int | None
    has_gpu: bool
    steps: int
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> dict[str, float]:
        inside = [parts for phase, parts in self.phases.items() if phase != BETWEEN]
        return {key: sum(parts[key] for parts in inside) for key in COLUMNS}


def summarize(trace: Trace) -> Summary:
    by_kind, by_class = defaultdict(list), defaultdict(list)
    for work in trace.work:
        by_kind[work.kind].append((work.start, work.stop))
        by_class[work.kernel_class].append((work.start, work.stop))
    exposed, before = {}, []
    for kind in ("compute", "all_to_all", "comm", "copy"):
        exposed[kind] = subtract(union(by_kind[kind]), before)
        before = union(before + exposed[kind])

    windows = device_windows(trace)
    summary = Summary(trace.name, trace.rank, trace.has_gpu, trace.steps)
    for name in (*PHASES, OTHER, BETWEEN):
        parts = dict.fromkeys(COLUMNS, 0.0)
        for start, stop, phase in windows:
            if phase == name:
                busy = {kind: length_within(intervals, start, stop) for kind, intervals in exposed.items()}
                busy["idle"] = max(0.0, stop - start - sum(busy.values()))
                parts = {key: parts[key] + busy[key] for key in COLUMNS}
        if any(parts.values()):
            summary.phases[name] = {key: value / trace.steps for key, value in parts.items()}
    inside = [(start, stop) for start, stop, phase in windows if phase != BETWEEN]
    for name, intervals in by_class.items():
        busy = union(intervals)
        summary.kernels[name] = sum(length_within(busy, start, stop) for start, stop in inside) / trace.steps
    return summary


def device_windows(trace: Trace) -> list[tuple[float, float, str]]:
    """`(start, stop, phase)` of each segment as the device saw it; one begins where the last ends."""
    starts = [segment.start for segment in trace.segments]
    launched = defaultdict(list)
    for work in trace.work:
        launched[max(0, bisect.bisect_right(starts, work.launch) - 1)].append(work)
    begins, begin, busy_until = [], starts[0], starts[0]
    for number, segment in enumerate(trace.segments):
        work = launched[number]
        first = min((w.start for w in work if w.kind == "compute"), default=float("inf"))
        begin = max(begin, min(first, max(segment.start, busy_until)))
        begins.append(begin)
        busy_until = max([busy_until, *(w.stop for w in work)])
    return [(start, stop, segment.phase) for start, stop, segment in zip(begins, begins[1:], trace.segments)]


def text(summary: Summary) -> str:
    """For a person, ms a step."""
    rank = "" if summary.rank is None else f"rank {summary.rank}, "
    told_by = "" if summary.has_gpu else "; no GPU in it: told by the CPU's operators"
    lines = [f"{summary.trace}: {rank}{summary.steps} step{'s' * (summary.steps != 1)}, ms a step{told_by}"]
    lines.append(f"{'phase':13}{'total':>12}" + "".join(f"{title:>20}" for title in COLUMNS.values()))
    rows = {phase: parts for phase, parts in summary.phases.items() if phase != BETWEEN} | {"step": summary.step}
    if BETWEEN in summary.phases:
        rows[BETWEEN] = summary.phases[BETWEEN]
    for phase, parts in rows.items():
        total = sum(parts.values())
        cells = (f"{parts[key] / 1e3:12,.2f}{_share(parts[key], total):>8}" for key in COLUMNS)
        lines.append(f"{phase:13}{total / 1e3:12,.2f}" + "".join(cells))
    lines += ["", f"{'kernels':13}{'busy':>12}{'of the step':>20}"]
    whole = sum(summary.step.values())
    for name, busy in sorted(summary.kernels.items(), key=lambda item: -item[1]):
        lines.append(f"{name:13}{busy / 1e3:12,.2f}{_share(busy, whole):>20}")
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def as_json(summary: Summary) -> dict:
    """Seconds a step."""
    rows = summary.phases | {"step": summary.step}
    seconds = {phase: {key: value / 1e6 for key, value in parts.items()} for phase, parts in rows.items()}
    return {
        "trace": summary.trace, "rank": summary.rank, "gpu": summary.has_gpu, "steps": summary.steps,
        "phases": {phase: parts | {"total": sum(parts.values())} for phase, parts in seconds.items()},
        "kernels": {name: busy / 1e6 for name, busy in summary.kernels.items()},
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="FILE", help=".json or .json.gz")
    parser.add_argument("--json", action="store_true", help="for programs: a list of one object a trace, seconds a step")
    args = parser.parse_args(argv)
    summaries = []
    for path in args.traces:
        try:
            summaries.append(summarize(read_trace(path)))
        except IsADirectoryError:
            print(f"trace_summary: {path} is a directory; {Path(path) / '*.json.gz'} works", file=sys.stderr)
        except FileNotFoundError:
            print(f"trace_summary: there is no {path}; traces are in the --profile-dir of pretrain_llama.py", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"trace_summary: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps([as_json(summary) for summary in summaries], indent=2))
    elif summaries:
        print("\n\n".join(text(summary) for summary in summaries))
    return 0 if len(summaries) == len(args.traces) else 1


if __name__ == "__main__":
    sys.exit(main())
