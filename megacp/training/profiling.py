"""Traces of chosen steps by torch's profiler, with names of ours in them.

    pretrain_llama.py … --tensorboard-dir runs --profile --profile-step-start 10 --profile-step-end 12 --profile-ranks 0 7

    profile    steps 10 to 11: runs/rank0-steps10-11.1764451234.pt.trace.json.gz

ui.perfetto.dev and chrome://tracing show such a file, TensorBoard's profiler plugin (torch-tb-profiler) finds it in its folder, and
tools/trace_summary.py says where the time went. The names, nested:

    step 10
        forward
            layer 0 forward … tile 8192 … pack_q stage 1 … all-to-all … all-to-all wait … attention forward … copy to host … mlp
            head
        backward
            layer 3 backward … pack_do stage 0 … attention backward … copy to device … mlp backward
        optimizer

The named functions are wrapped and the model hooked only from the step before the first profiled one (which warms the profiler up)
to the last: at other times nothing is there to cost anything.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megacp.context_parallel import engine
from megacp.context_parallel.all_to_all import Exchange
from megacp.data.batch import PackedBatch
from megacp.memory.copies import Copies
from megacp.model import attention_projections, decoder_layer, output_head
from megacp.model.attention_projections import AttentionProjections
from megacp.model.llama import Llama
from megacp.training import step as training_step
from megacp.training.wrapping import Wrapper, wrapped

STAGE_FUNCTIONS = ("pack_q", "pack_kv", "pack_do", "take_dq", "take_dkv")  # of AttentionProjections, for one stage each


class StepProfiler:
    """Profiles steps `[first, stop)` of this rank into `directory`. A watcher of the training loop, and a context manager."""

    def __init__(
        self, first: int, stop: int, directory: str, rank: int, model: Llama, optimizer: torch.optim.Optimizer, device: torch.device
    ):
        self._first, self._stop, self._directory, self._rank = first, stop, Path(directory), rank
        self._model, self._optimizer, self._cuda = model, optimizer, device.type == "cuda"
        self._running = ExitStack()  # the profiler and what it needs; empty when none runs
        self._profile: profile | None = None
        self._begun, self._step = False, 0
        self._told = False  # that nothing will be profiled

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind, *exception) -> None:
        """Also writes what was profiled when the run ends before the last step to profile."""
        self._finish()
        if kind is None and not self._begun and not self._told:
            done = f"ended with step {self._step}" if self._step else "trained nothing"
            print(f"warning: no profile: the run {done}, and --profile-step-start was {self._first}", flush=True)

    def start_step(self, step: int, batches: list[PackedBatch]) -> None:
        if self._profile is None and self._first - 1 <= step < self._stop:
            self._begin(step)
        if not self._step and step >= self._stop:
            works = f"--profile-step-start {step + 1} --profile-step-end {step + 3} works"
            print(f"warning: no profile: the run goes on with step {step}, and --profile-step-end is {self._stop}; {works}", flush=True)
            self._told = True
        self._step = step
        self._range = _Range(f"step {step}")
        if self._profile is not None:
            self._range.begin()

    def finish_step(self) -> None:
        if self._profile is None:
            return
        if self._cuda:
            torch.cuda.synchronize()  # else the end of the last step would be missing
        self._range.end()
        if self._step == self._stop - 1:
            self._finish()
        else:
            self._profile.step()

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
        first = max(step, self._first)
        phases = schedule(wait=0, warmup=first - step, active=self._stop - first, repeat=1)
        self._profile = profile(activities=activities, schedule=phases, on_trace_ready=lambda trace: self._write(trace, first))
        self._running.enter_context(named_ranges(self._model, self._optimizer))
        self._running.enter_context(self._profile)

    def _finish(self) -> None:
        self._running.close()
        self._profile = None

    def _write(self, trace: profile, first: int) -> None:
        """A trace that cannot be written ends with a warning: the run is worth more. There is none of a run that ended in the warm-up."""
        if self._step < first:
            return
        self._begun = True
        steps = f"{first}-{self._step}"
        path = self._directory / f"rank{self._rank}-steps{steps}.{int(time.time())}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        except OSError as error:
            print(f"warning: the profile of steps {steps}, rank {self._rank}, could not be written: {error}", flush=True)
        else:
            print(f"{'profile':10} steps {first} to {self._step}: {path}", flush=True)


@contextmanager
def named_ranges(model: Llama, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While the block runs, a trace shows the names above."""
    targets = [(torch.Tensor, "backward", _named("backward"))]
    targets += [(AttentionProjections, name, _named_by_stage(name)) for name in STAGE_FUNCTIONS]
    targets += [(owner, "read_ahead", _named_by_tile) for owner in (attention_projections, decoder_layer)]
    targets += [(output_head, "tiles", _named_by_tile), (engine, "all_to_all", _named("all-to-all"))]
    targets += [(Exchange, "wait", _named("all-to-all wait"))]
    targets += [(engine, f"attention_{way}", _named(f"attention {way}")) for way in ("forward", "backward")]
    targets += [(decoder_layer, "_mlp_forward", _named("mlp")), (decoder_layer, "_mlp_backward_", _named("mlp backward"))]
    targets += [(Copies, "to_host", _named("copy to host")), (Copies, "to_device", _named("copy to device"))]
    targets += [(training_step, "clip_grad_norm", _named("optimizer")), (optimizer, "step", _named("optimizer"))]
    with ExitStack() as undo:
        undo.enter_context(wrapped(targets))
        for module, name in [(model, "forward"), (model.output_head, "head")]:
            _hook(undo, module, _Range(name))
        for layer in model.layers:
            _hook(undo, layer, _Range(f"layer {layer.number} forward"))
            undo.callback(layer.register_forward_hook(_name_backward).remove)
        yield


class _Range:
    """A range that begins and ends in hooks, whose arguments do not matter."""

    def __init__(self, name: str):
        self._name = name

    def begin(self, *_) -> None:
        self._open = record_function(self._name)
        self._open.__enter__()

    def end(self, *_) -> None:
        self._open.__exit__(None, None, None)


def _hook(undo: ExitStack, module: nn.Module, span: _Range) -> None:
    """Around all that `module` does, gathering its weights and freeing them too."""
    undo.callback(module.register_forward_pre_hook(span.begin, prepend=True).remove)
    undo.callback(module.register_forward_hook(span.end).remove)


def _name_backward(layer: nn.Module, arguments: tuple, h_Td: torch.Tensor) -> None:
    if h_Td.grad_fn is not None:  # the layer's one node
        span = _Range(f"layer {layer.number} backward")
        h_Td.grad_fn.register_prehook(span.begin)
        h_Td.grad_fn.register_hook(span.end)


def _named(name: str) -> Wrapper:
    def wrapper(original: Callable) -> Callable:
        @wraps(original)
        def named(*args, **kwargs):
            with record_function(name):
                return original(*args, **kwargs)

        return named

    return wrapper


def _named_by_stage(name: str) -> Wrapper:
    def wrapper(original: Callable) -> Callable:
        @wraps(original)
        def named(projections, stage, *args, **kwargs):
            with record_function(f"{name} stage {stage.index}"):
                return original(projections, stage, *args, **kwargs)

        return named

    return wrapper


def _named_by_tile(original: Callable) -> Callable:
    """For a generator of tiles, `(start, …)` or `((start, …), …)`: names what its user does with each."""

    @wraps(original)
    def named(*args, **kwargs):
        for item in original(*args, **kwargs):
            first = item[0]
            with record_function(f"tile {first if isinstance(first, int) else first[0]}"):
                yield item

    return named
