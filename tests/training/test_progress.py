"""A step of an hour must say where it is, truly, and neither slow the run nor outlive it."""

import dataclasses
import doctest
import io
import json
import os
import re
import threading
import time

import pytest
import torch
from torch import nn

import megacp.training.progress
import megacp.training.watchers
from megacp.data.batch import PackedBatch
from megacp.model.config import preset
from megacp.training.metrics import model_flops_per_step
from megacp.training.progress import UNKNOWN_COSTS, measured_costs, position, step_parts
from megacp.training.progress_monitor import CLEAR_LINE, HEARTBEAT_SECONDS, HostMarks, ProgressMonitor

CONFIG = dataclasses.replace(preset("llama-tiny"), num_layers=2)
PARTS = [("forward", 0), ("forward", 1), ("head", None), ("backward", 1), ("backward", 0)]


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_parts_come_in_the_order_of_the_step_and_weigh_what_the_model_computes():
    pairs, tokens = [100, 3000], 80
    parts = step_parts(CONFIG, pairs, tokens, recompute=False)
    assert [(p.micro_batch, p.phase, p.layer) for p in parts] == [
        *((1, *part) for part in PARTS), *((2, *part) for part in PARTS), (2, "optimizer", None)
    ]  # fmt: skip
    once = sum(p.work for p in parts if p.phase == "forward") + sum(p.work / 3 for p in parts if p.phase == "head")
    assert 3 * once == pytest.approx(model_flops_per_step(CONFIG, 2 * tokens, sum(pairs)))


def test_recomputed_attention_is_one_more_forward_of_it():
    plain, again = (step_parts(CONFIG, [10**6], 1, recompute)[3].work for recompute in (False, True))
    assert again - plain == 4 * CONFIG.num_attention_heads * CONFIG.kv_channels * 10**6


def test_the_share_done_is_of_the_time_that_the_last_step_measured():
    before = step_parts(CONFIG, [1000], 10, recompute=False)
    costs = measured_costs(before, [2.0, 4.0, 1.0, 9.0, 9.0, 5.0], UNKNOWN_COSTS)
    assert [position(before, done, costs, 30.0).fraction for done in range(7)] == pytest.approx(
        [0, 3 / 30, 6 / 30, 7 / 30, 16 / 30, 25 / 30, 1]
    )
    longer = step_parts(CONFIG, [4000], 40, recompute=False)  # four times the work of the model, the same optimizer
    assert position(longer, 2, costs, 30.0).fraction == pytest.approx(4 * 6 / (4 * 25 + 5))


def test_unknown_times_leave_costs_as_they_were_but_for_the_optimizer():
    parts = step_parts(CONFIG, [1000], 10, recompute=False)
    assert measured_costs(parts, [1.0, 1.0, None, 1.0, 1.0, 1.0], UNKNOWN_COSTS) == UNKNOWN_COSTS
    known = measured_costs(parts, [2.0, None, 1.0, 9.0, 9.0, None], UNKNOWN_COSTS)
    assert known["forward"] == 2.0 / parts[0].work and known["optimizer"] == 0.0


def test_the_eta_is_the_rest_at_the_pace_so_far_and_counts_down_between_borders():
    parts = step_parts(CONFIG, [1000], 10, recompute=False)
    costs = measured_costs(parts, [2.0, 2.0, 2.0, 2.0, 2.0, 0.0], UNKNOWN_COSTS)
    assert position(parts, 0, costs, 7.0).eta_s is None
    assert position(parts, 2, costs, 100.0).eta_s == pytest.approx(150.0)
    assert position(parts, 2, costs, 120.0, since_last_s=20.0).eta_s == pytest.approx(130.0)
    assert position(parts, 2, costs, 900.0, since_last_s=800.0).eta_s == 0.0
    assert position(parts, 6, costs, 250.0).eta_s == 0.0
    where = position(parts, 3, costs, 100.0)
    assert (where.phase, where.layer, where.micro_batch) == ("backward", 1, 1)


def test_the_examples_of_the_docstrings():
    for module in (megacp.training.progress, megacp.training.watchers):
        assert doctest.testmod(module).failed == 0


# ----------------------------------------------------------------------------------------------------------- monitor


class Layer(nn.Module):
    def forward(self, x):
        return x * 2


class Head(nn.Module):
    def forward(self, x):
        return x.sum()


class Model(nn.Module):
    """What a monitor hooks into."""

    config = CONFIG

    def __init__(self):
        super().__init__()
        self.layers, self.output_head = nn.ModuleList([Layer(), Layer()]), Head()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.output_head(x)


class Gpu:
    """Marks of a device that the host runs ahead of: what it has done is what the test says. A part takes a second."""

    def __init__(self):
        self.recorded = self.reached = 0

    def record(self):
        self.recorded += 1
        return self.recorded

    def passed(self, mark):
        return mark <= self.reached

    def seconds(self, start, stop):
        return float(stop - start)


class Terminal(io.StringIO):
    def isatty(self):
        return True


BATCH = PackedBatch(*[torch.zeros(16, dtype=torch.int64)] * 3, (0, 10, 16), 16, 16)


class Bench:
    """A monitor whose clock and GPU the test moves; its thread never wakes."""

    def __init__(self, **changes):
        self.now, self.gpu, self.model = 1000.0, Gpu(), Model()
        self.stream = changes.pop("stream", io.StringIO())
        settings = dict(interval=30.0, heartbeat=None, rank=0, recompute=False)
        self.monitor = ProgressMonitor(
            self.model, train_iters=9, tokens=1600, marks=self.gpu, device=torch.device("cpu"), stream=self.stream,
            clock=lambda: self.now, **settings | changes,
        )  # fmt: skip
        self.monitor._watch = lambda: None
        self.monitor._thread = threading.Thread(target=lambda: None)

    def enqueue(self, step, micro_batches=1):
        self.monitor.start_step(step, [BATCH] * micro_batches)
        for _ in range(micro_batches):
            self.model(torch.ones(2, requires_grad=True)).backward()

    def tick(self, at, reached=None):
        """At second `at` of the test, with `reached` parts of the step done by the GPU."""
        self.now = 1000.0 + at
        if reached is not None:
            self.gpu.reached = self.start + reached
        self.monitor.tick()

    def begin(self, step, **kwargs):
        self.start = self.gpu.recorded + 1
        self.enqueue(step, **kwargs)

    def text(self):
        return self.stream.getvalue()


def test_the_console_tells_what_the_gpu_has_done_not_what_was_enqueued():
    bench = Bench()
    with bench.monitor:
        bench.begin(3, micro_batches=2)
        told = []
        for second, reached in ((30, -1), (60, 0), (90, 2), (120, 4), (150, 8), (180, 10)):
            bench.tick(second, reached)
            told.append(re.sub(" +", " ", bench.text().splitlines()[-1]).split(" | "))
    assert [line[1] for line in told] == [
        "forward layer 1/2", "forward layer 1/2", "head", "backward layer 1/2", "backward layer 2/2", "optimizer"
    ]  # fmt: skip
    assert [line[2] for line in told] == [f"micro-batch {n}/2" for n in (1, 1, 1, 1, 2, 2)]
    assert told[0][0] == "step 3/9" and told[0][4] == "0 of 1,600 tokens" and "ETA" not in told[1][5]
    assert told[-1][3:] == ["100.0%", "1,600 of 1,600 tokens", "0:03:00 in, ETA 0:00:00"]


def test_a_log_file_gets_a_line_every_so_often_and_a_short_step_none():
    bench = Bench()
    with bench.monitor:
        bench.begin(1)
        for second in range(0, 30):
            bench.tick(second, 3)
        bench.monitor.finish_step()
        assert bench.text() == ""
        bench.now = 1100.0
        bench.begin(2)
        for second in range(100, 200):
            bench.tick(second, 3)
    assert len(bench.text().splitlines()) == 3  # 30, 60 and 90 seconds into the step
    assert "\r" not in bench.text() and "0:00:30 in" in bench.text()


def test_on_a_terminal_one_line_is_rewritten_and_gone_when_the_step_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    bench = Bench(stream=Terminal())
    with bench.monitor:
        bench.begin(1)
        for second in range(0, 33):
            bench.tick(second, 3)
        bench.monitor.finish_step()
        bench.tick(50)
    *lines, last = bench.text().split(CLEAR_LINE)[1:]
    assert len(lines) == 3 and last == "" and "\n" not in bench.text()
    assert all(len(line) == 59 for line in lines)


def test_a_measured_step_weighs_the_parts_of_the_next():
    bench = Bench()
    with bench.monitor:
        bench.begin(1)
        bench.monitor.finish_step()
        bench.gpu.reached = bench.gpu.recorded  # every part took a second
        bench.begin(2)
        bench.tick(30, 3)
        assert " 50.0% " in bench.text()


def test_evaluations_between_steps_are_no_progress_and_no_hooks_stay():
    bench = Bench()
    with bench.monitor:
        bench.begin(1)
        bench.monitor.finish_step()
        recorded = bench.gpu.recorded
        bench.model(torch.ones(2))
        assert bench.gpu.recorded == recorded
    assert not any(module._forward_hooks for module in bench.model.modules())


def test_the_heartbeat_says_where_the_run_is_and_since_when(tmp_path):
    file = tmp_path / "new" / "beat.json"
    bench = Bench(heartbeat=str(file), interval=0.0, rank=3)

    def beat(at, reached=None):
        bench.tick(at, reached)
        return json.loads(file.read_text())

    with pytest.raises(KeyError), bench.monitor:
        assert beat(0) == {"time": 1000.0, "rank": 3, "train_iters": 9, "step": None, "last_progress": None, "phase": "starting"}
        bench.begin(4)
        state = beat(HEARTBEAT_SECONDS, 4)
        assert (state["time"], state["step"], state["phase"], state["layer"], state["micro_batch"]) == (1005.0, 4, "backward", 0, 1)
        assert state["last_progress"] == 1005.0 and 0 < state["fraction"] < 1 and state["eta_s"] > 0
        assert state["tokens"] == int(1600 * state["fraction"])
        assert beat(HEARTBEAT_SECONDS + 1, 5)["time"] == 1005.0  # not yet due
        assert beat(2 * HEARTBEAT_SECONDS)["last_progress"] == 1006.0  # the GPU hangs
        bench.monitor.finish_step()
        assert beat(20)["phase"] == "between steps"
        bench.begin(5)
        raise KeyError
    assert json.loads(file.read_text())["phase"] == "failed"
    assert bench.text() == "" and os.listdir(file.parent) == [file.name]


def test_a_heartbeat_that_cannot_be_written_ends_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    bench = Bench(heartbeat=str(tmp_path / "file" / "beat.json"), interval=0.0)
    with bench.monitor:
        for second in range(0, 30, 10):
            bench.tick(second)
    assert bench.text().count("warning: --heartbeat-file") == 1


def test_the_heartbeat_is_whole_whenever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("megacp.training.progress_monitor.HEARTBEAT_SECONDS", 0.0)
    file, reads = tmp_path / "beat.json", 0
    settings = dict(train_iters=9, tokens=1600, recompute=False, marks=HostMarks(), rank=0, device=torch.device("cpu"))
    model = Model()
    with ProgressMonitor(model, interval=0.004, heartbeat=str(file), stream=io.StringIO(), **settings) as monitor:
        thread = monitor._thread
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline
        end = time.monotonic() + 0.5
        step = 0
        while time.monotonic() < end:
            step += 1
            monitor.start_step(step, [BATCH])
            model(torch.ones(2, requires_grad=True)).backward()
            assert json.loads(file.read_text())["rank"] == 0
            monitor.finish_step()
            reads += 1
        assert thread.is_alive()
    assert reads > 20 and not thread.is_alive()
    assert json.loads(file.read_text())["phase"] == "ended"


def test_the_thread_ends_when_the_run_fails(tmp_path):
    settings = dict(train_iters=9, tokens=1600, recompute=False, marks=HostMarks(), rank=0, device=torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        with ProgressMonitor(Model(), interval=30.0, heartbeat=None, stream=io.StringIO(), **settings) as monitor:
            monitor.start_step(1, [BATCH])
            raise KeyboardInterrupt
    assert not monitor._thread.is_alive()
