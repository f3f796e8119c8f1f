"""Progress inside a step that lasts minutes to hours, on the console and in a heartbeat file, without a wait for the GPU.

    with ProgressMonitor(model, train_iters=500, tokens=4194304, recompute=False, marks=marks_of(device), interval=30.0,
                         heartbeat="runs/heartbeat.json", rank=0, device=device) as monitor:
        TrainingRun(..., watchers=[monitor]).train(logger)

    step  12/500 | backward  layer 17/32 |  43.2% | 1,811,939 of 4,194,304 tokens |  0:12:30 in, ETA  0:16:27

    {"time": 1764451234.5, "rank": 0, "step": 12, "phase": "backward", "layer": 16, "fraction": 0.432, "eta_s": 987.1, …}

Hooks at the borders of the layers leave marks in the GPU's queue (CUDA events). A thread asks now and then which of them the GPU
has passed: what is told is what is done, not what is enqueued. In a step that hangs, the heartbeat's `time` goes on and its
`last_progress` does not, on the rank at fault first; between steps, as in an evaluation, it stands still too.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TextIO

import torch
from torch import Tensor, nn

from megacp.data.batch import PackedBatch
from megacp.model.llama import Llama
from megacp.training.metrics import causal_pairs
from megacp.training.progress import UNKNOWN_COSTS, Part, Position, measured_costs, position, progress_line, step_parts

HEARTBEAT_SECONDS = 5.0
LONGEST_NAP_SECONDS = 1.0  # of the thread; a terminal's line is as old as that
JOIN_SECONDS = 10.0  # a file system that hangs must not keep a run from ending
CLEAR_LINE = "\r\x1b[K"


class Marks(Protocol):
    """Points in the work of a device."""

    def record(self): ...  # a mark after all that the current stream was given so far
    def passed(self, mark) -> bool: ...  # the device is beyond it; returns at once
    def seconds(self, start, stop) -> float: ...  # between two passed marks


class HostMarks:
    """On a CPU what was called is done."""

    def record(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class CudaMarks:
    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop) / 1000


def marks_of(device: torch.device) -> Marks:
    return CudaMarks() if device.type == "cuda" else HostMarks()


class _Step:
    """A step under way: `marks[0]` is its start, `marks[n]` the end of part `n - 1`."""

    def __init__(self, number: int, parts: list[Part], micro_batches: int, now: float):
        self.number, self.parts, self.micro_batches = number, parts, micro_batches
        self.marks: list = []
        self.done, self.started, self.last_progress = 0, now, now
        self.shown: float | None = None  # when the console told of it last


class ProgressMonitor:
    """A watcher of the training loop, and a context manager, in which its thread lives.

    `tokens`: of a step over all ranks. `interval`: seconds of a step before the console tells, and between two lines of a log; 0:
    it never does. `heartbeat` None: no file. `stream` None: standard output.
    """

    def __init__(
        self, model: Llama, *, train_iters: int, tokens: int, recompute: bool, marks: Marks, interval: float, heartbeat: str | None,
        rank: int, device: torch.device, stream: TextIO | None = None, clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        self._model, self._train_iters, self._tokens, self._recompute = model, train_iters, tokens, recompute
        self._marks, self._interval, self._rank, self._device = marks, interval, rank, device
        self._heartbeat = None if heartbeat is None else Path(heartbeat)
        self._stream, self._clock = stream or sys.stdout, clock
        self._terminal = self._stream.isatty()
        self._costs = UNKNOWN_COSTS
        self._step: _Step | None = None
        self._former: _Step | None = None
        self._between = "starting"  # what the heartbeat says while no step is on
        self._beat_time: float | None = None
        self._lock = threading.Lock()  # between the training and the thread: whoever holds it may read the step and write
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._hooks: list = []

    def __enter__(self) -> "ProgressMonitor":
        for layer in self._model.layers:
            self._hooks.append(layer.register_forward_hook(self._layer_done, prepend=True))
        self._hooks.append(self._model.output_head.register_forward_hook(self._part_done, prepend=True))
        self._thread.start()
        return self

    def __exit__(self, kind, *exception) -> None:
        for hook in self._hooks:
            hook.remove()
        self._ended.set()
        self._thread.join(JOIN_SECONDS)
        with self._lock:
            self._clear_line()
            self._between = "ended" if kind is None else "failed"
            self._beat(self._clock())

    def start_step(self, step: int, batches: list[PackedBatch]) -> None:
        pairs = [causal_pairs(batch.cu_seqlens) for batch in batches]
        parts = step_parts(self._model.config, pairs, batches[0].sequence_length, self._recompute)
        with self._lock:
            if self._former is not None:
                self._costs = measured_costs(self._former.parts, self._part_seconds(self._former), self._costs)
            self._step = _Step(step, parts, len(batches), self._clock())
            self._step.marks.append(self._marks.record())

    def finish_step(self) -> None:
        with self._lock:
            self._step.marks.append(self._marks.record())
            self._clear_line()
            self._former, self._step, self._between = self._step, None, "between steps"

    def tick(self) -> None:
        """What the thread does now and then."""
        with self._lock:
            now = self._clock()
            if self._step is not None:
                self._advance(self._step, now)
                self._show(self._step, now)
            if self._beat_time is None or now - self._beat_time >= HEARTBEAT_SECONDS:
                self._beat(now)

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first GPU, and would take memory there
        nap = min(LONGEST_NAP_SECONDS, self._interval / 4 or LONGEST_NAP_SECONDS)
        while not self._ended.wait(nap):
            self.tick()

    def _part_done(self, *_) -> None:
        if self._step is not None:
            self._step.marks.append(self._marks.record())

    def _layer_done(self, layer: nn.Module, arguments: tuple, h_Td: Tensor) -> None:
        self._part_done()
        if h_Td.grad_fn is not None:  # the layer's one node
            h_Td.grad_fn.register_hook(self._part_done)

    def _advance(self, step: _Step, now: float) -> None:
        while step.done + 1 < len(step.marks) and self._marks.passed(step.marks[step.done + 1]):
            step.done += 1
            step.last_progress = now

    def _part_seconds(self, step: _Step) -> list[float | None]:
        passed = [self._marks.passed(mark) for mark in step.marks]
        return [
            self._marks.seconds(start, stop) if begun and over else None
            for start, stop, begun, over in zip(step.marks, step.marks[1:], passed, passed[1:])
        ]

    def _position(self, step: _Step, now: float) -> Position:
        return position(step.parts, step.done, self._costs, now - step.started, now - step.last_progress)

    def _show(self, step: _Step, now: float) -> None:
        if not self._interval or now - step.started < self._interval:
            return
        if not self._terminal and step.shown is not None and now - step.shown < self._interval:
            return
        layers = self._model.config.num_layers
        where = self._position(step, now)
        line = progress_line(step.number, self._train_iters, where, layers, step.micro_batches, self._tokens)
        step.shown = now
        if self._terminal:
            self._stream.write(CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])  # a wrapped line could not be cleared
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _clear_line(self) -> None:
        if self._terminal and self._step is not None and self._step.shown is not None:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()

    def _beat(self, now: float) -> None:
        """Replaces the heartbeat file, whole at any moment. When that fails it ends with a warning: the run is worth more."""
        if self._heartbeat is None:
            return
        self._beat_time = now
        try:
            self._heartbeat.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._heartbeat.with_name(self._heartbeat.name + ".tmp")
            fresh.write_text(json.dumps(self._state(now)) + "\n", encoding="utf-8")
            os.replace(fresh, self._heartbeat)
        except OSError as error:
            self._heartbeat = None
            print(f"warning: --heartbeat-file: {error}: it is not written any more, the run goes on", file=self._stream, flush=True)

    def _state(self, now: float) -> dict:
        state = {"time": now, "rank": self._rank, "train_iters": self._train_iters}
        step = self._step or self._former
        state |= {"step": None if step is None else step.number, "last_progress": None if step is None else step.last_progress}
        if self._step is None or self._between in ("ended", "failed"):
            return state | {"phase": self._between}
        where = self._position(self._step, now)
        return state | asdict(where) | {"tokens": int(where.fraction * self._tokens), "tokens_of_step": self._tokens}
