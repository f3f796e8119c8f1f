"""A summary that counts time twice, or gives it to the wrong phase, sends the next week's work to the wrong place."""

import doctest
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "trace_summary.py"
tool = load_tool(TOOL)
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(intervals):
    """Every microsecond of any interval, one by one."""
    return {at for start, stop in intervals for at in range(start, stop)}


# ----------------------------------------------------------------------------------------------------------- intervals


@settings(deadline=None)
@given(INTERVALS, INTERVALS, st.integers(0, 60), st.integers(0, 60))
def test_interval_arithmetic_is_that_of_sets_of_microseconds(some, others, start, stop):
    a, b = tool.union(some), tool.union(others)
    assert points(a) == points(some)
    assert all(left[1] < right[0] for left, right in zip(a, a[1:])) and all(begin < end for begin, end in a)
    rest = tool.subtract(a, b)
    assert points(rest) == points(a) - points(b)
    assert sum(end - begin for begin, end in rest) == len(points(rest))
    start, stop = sorted((start, stop))
    assert tool.length_within(a, start, stop) == len([at for at in points(a) if start <= at < stop])


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(tool).failed == 0


# ------------------------------------------------------------------------------------------------------ made-up traces


class Recorder:
    """Events of a trace as Kineto writes them, times in microseconds."""

    def __init__(self):
        self.events, self.correlation = [{"ph": "M", "name": "process_name", "pid": 1}], 0

    def range(self, name, start, stop, category="user_annotation"):
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": {}})

    def device(self, name, launch, start, stop, category="kernel", api="cuda_runtime"):
        self.correlation += 1
        args = {"correlation": self.correlation}
        self.events.append({"ph": "X", "cat": api, "name": "launch", "ts": launch, "dur": 1, "args": args})
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": args})

    def write(self, path, **more):
        content = json.dumps({"traceEvents": self.events, **more})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(content.encode()))
        else:
            path.write_text(content)
        return path


def step_with_a_lagging_gpu(trace, at, number):
    """165 µs: a GPU that runs behind the host, and waits in each of the ways that there are."""
    trace.range(f"step {number}", at, at + 165)
    trace.range("forward", at + 5, at + 40)
    trace.range("head", at + 20, at + 30)
    trace.range("backward", at + 40, at + 70)
    trace.range("optimizer", at + 75, at + 90)
    trace.device("flash_fwd_kernel", at + 6, at + 10, at + 50)
    trace.device("ncclDevKernel_SendRecv", at + 8, at + 45, at + 60)  # exposed from 50 on
    trace.device("ncclDevKernel_AllGather", at + 21, at + 46, at + 48)  # of the head's weights, fetched ahead
    trace.device("nvjet_tst_128x256_64x4", at + 22, at + 60, at + 80, api="cuda_driver")
    trace.device("Memcpy DtoH (Device -> Pinned)", at + 23, at + 75, at + 85, "gpu_memcpy")  # exposed from 80 on
    trace.device("ncclDevKernel_ReduceScatter", at + 44, at + 85, at + 88)
    trace.device("flash_bwd_kernel", at + 45, at + 90, at + 140)  # 88 to 90 nothing runs
    trace.device("Memcpy DtoD (Device -> Device)", at + 46, at + 140, at + 145, "gpu_memcpy")
    trace.device("Memset (Device)", at + 47, at + 145, at + 150, "gpu_memset")
    trace.device("multi_tensor_apply_kernel", at + 76, at + 150, at + 160)


LAGGING = {  # µs: compute, exposed all-to-all, other exposed communication, exposed copies, idle
    "forward": (40, 10, 0, 0, 5),
    "head": (20, 0, 0, 5, 0),
    "backward": (60, 0, 3, 0, 2),
    "optimizer": (10, 0, 0, 0, 0),
    "other": (0, 0, 0, 0, 10),  # 0 to 5, and 160 to 165
    "step": (130, 10, 3, 5, 17),
}
LAGGING_KERNELS = {"attention": 90, "gemm": 20, "device copies": 5, "element-wise": 15, "collectives": 18, "host copies": 10}


def microseconds(summary):
    rows = {phase: tuple(round(parts[key], 6) for key in tool.COLUMNS) for phase, parts in summary.phases.items()}
    return rows | {"step": tuple(round(summary.step[key], 6) for key in tool.COLUMNS)}


def test_work_belongs_to_the_phase_that_launched_it_and_waiting_is_told_apart(tmp_path):
    trace = Recorder()
    step_with_a_lagging_gpu(trace, 1000, 7)
    summary = tool.summarize(tool.read_trace(trace.write(tmp_path / "t.json", distributedInfo={"rank": 3})))
    assert (summary.steps, summary.rank, summary.has_gpu) == (1, 3, True)
    assert microseconds(summary) == LAGGING
    assert summary.kernels == LAGGING_KERNELS


def test_figures_are_a_step_and_what_lies_between_steps_is_none_of_them(tmp_path):
    trace = Recorder()
    step_with_a_lagging_gpu(trace, 0, 1)
    trace.device("gemm of an evaluation", 170, 170, 190)
    step_with_a_lagging_gpu(trace, 200, 2)
    trace.range("ProfilerStep#1", 0, 400)
    summary = tool.summarize(tool.read_trace(trace.write(tmp_path / "t.json.gz")))
    assert summary.steps == 2
    assert microseconds(summary) == LAGGING | {"between steps": (10, 0, 0, 0, 7.5)}
    assert summary.kernels == LAGGING_KERNELS


def test_a_trace_of_another_program_is_told_as_a_whole(tmp_path):
    trace = Recorder()
    trace.device("triton_poi_fused", 0, 10, 30)
    before = {"ph": "X", "cat": "kernel", "name": "of a launch before the trace", "ts": 2, "dur": 3, "args": {"correlation": 99}}
    trace.events.append(before)
    trace.device("ncclKernel_AllGather", 40, 40, 41)
    summary = tool.summarize(tool.read_trace(trace.write(tmp_path / "t.json")))
    assert summary.steps == 1 and summary.phases.keys() == {"other"}
    parts = summary.phases["other"]
    assert (parts["compute"], parts["comm"]) == (23, 1)


KINDS = {
    "compute": ("k", "kernel"), "all_to_all": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel"),
    "comm": ("ncclDevKernel_AllGather_RING_LL", "kernel"), "copy": ("Memcpy HtoD", "gpu_memcpy"),
}  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([*KINDS]), st.integers(0, 80), st.integers(0, 20), st.integers(1, 30)), min_size=1,
                max_size=15),
       st.lists(st.integers(1, 60), min_size=4, max_size=4, unique=True))  # fmt: skip
def test_every_microsecond_is_counted_once_and_rightly(tmp_path_factory, work, borders):
    trace, busy = Recorder(), {kind: set() for kind in KINDS}
    for kind, launch, lag, duration in work:
        name, category = KINDS[kind]
        trace.device(name, launch, launch + lag, launch + lag + duration, category)
        busy[kind] |= points([(launch + lag, launch + lag + duration)])
    a, b, c, d = sorted(borders)
    for name, start, stop in (("step 1", 0, 140), ("forward", a, b), ("backward", b, c), ("optimizer", c, d)):
        trace.range(name, start, stop)
    read = tool.read_trace(trace.write(tmp_path_factory.mktemp("t") / "t.json"))
    windows = tool.device_windows(read)
    assert windows[0][0] == 0 and windows[-1][1] == 140
    assert all(one[1] == next_[0] for one, next_ in zip(windows, windows[1:]))
    expected = {}
    for start, stop, phase in windows:
        for at in range(int(start), int(stop)):
            kind = next((kind for kind in KINDS if at in busy[kind]), "idle")
            expected[phase, kind] = expected.get((phase, kind), 0) + 1
    phases = tool.summarize(read).phases
    assert {(phase, kind): value for phase, parts in phases.items() for kind, value in parts.items() if value} == expected


# ----------------------------------------------------------------------------------------------------------- the tool


def test_table_and_json_say_the_same(tmp_path, capsys):
    trace = Recorder()
    step_with_a_lagging_gpu(trace, 0, 1)
    path = str(trace.write(tmp_path / "t.json"))
    assert tool.main([path, path]) == 0
    table = capsys.readouterr().out
    assert table.count("ms a step") == 2
    row = next(line for line in table.splitlines() if line.startswith("forward"))
    assert row.split() == ["forward", "0.06", "0.04", "72.7%", "0.01", "18.2%", "0.00", "0.0%", "0.00", "0.0%", "0.01", "9.1%"]
    assert tool.main([path, "--json"]) == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert values["phases"]["step"]["total"] == pytest.approx(165e-6)
    assert values["phases"]["forward"] == pytest.approx(
        {"compute": 40e-6, "all_to_all": 10e-6, "comm": 0, "copy": 0, "idle": 5e-6, "total": 55e-6}
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"traceEvents": []}', b'{"traceEvents": 3}', b'{"traceEvents": [1]}', b"\x1f\x8b no gzip"],
)
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_is_no_trace_is_named(tmp_path, capsys, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert tool.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert tool.main([str(tmp_path / "absent")]) == 1
    assert "--profile-dir" in capsys.readouterr().err
    assert tool.main([str(tmp_path)]) == 1
    assert f"{tmp_path / '*.json.gz'} works" in capsys.readouterr().err


def test_a_bad_trace_keeps_none_of_the_others_from_being_told(tmp_path, capsys):
    trace = Recorder()
    step_with_a_lagging_gpu(trace, 0, 1)
    good, other, half = (trace.write(tmp_path / name) for name in ("good.json.gz", "other.json", "half.json.gz"))
    half.write_bytes(half.read_bytes()[:-30])
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(good.read_bytes()[:20] + b"\xff" * 20 + good.read_bytes()[40:])
    without_time = tmp_path / "without-time.json"
    without_time.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}))
    bad = [str(half), str(damaged), str(without_time), str(tmp_path / "absent")]
    assert tool.main([str(good), *bad, str(other)]) == 1
    told = capsys.readouterr()
    assert told.out.count("ms a step") == 2 and all(path in told.err for path in bad)
    assert tool.main([*bad, str(good), "--json"]) == 1
    assert [one["trace"] for one in json.loads(capsys.readouterr().out)] == [str(good)]


def test_half_a_file_is_named(tmp_path, capsys):
    trace = Recorder()
    step_with_a_lagging_gpu(trace, 0, 1)
    path = trace.write(tmp_path / "t.json.gz")
    path.write_bytes(path.read_bytes()[:-30])
    assert tool.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
