"""The most memory of each phase of a step, so that a person sees which phase to shrink.

    meter = PhaseMeter(model, CudaGauge(device))
    meter.start_step()
    loss = model(...); loss.backward()                # hooks of the model mark the phases on the way
    meter.mark("optimizer"); optimizer.step()
    meter.finish_step()
    meter.last_step["layer backward"].peak           # bytes, the most of all layers

| phase          | what runs                                                                    |
|----------------|------------------------------------------------------------------------------|
| embedding      | from the start of the step to the first layer                                |
| layer forward  | a decoder layer, its weights being there                                     |
| head           | final norm, lm_head and loss, which makes its gradients too                  |
| layer backward | a decoder layer's backward, up to its fp32 weight gradients                  |
| between        | weights gathered, gradients reduced, the embedding's gradient, the norm      |
| optimizer      | the update                                                                   |

A gauge is anything with `live_bytes`, `peak_bytes` and `reset_peak`: `CudaGauge` asks the GPU's allocator, an `AllocationCounter`
counts on a CPU. Allocation follows the order of the program and not of the GPU's queue, so nothing here waits for the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from megacp.memory.counting import AllocationCounter
from megacp.model.llama import Llama

BETWEEN = "between"
HISTORY_EVENTS = 200_000  # allocations and frees that a memory history keeps, the last ones


class Gauge(Protocol):
    def live_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...  # since the last reset
    def reset_peak(self) -> None: ...


class CudaGauge:
    """What PyTorch's allocator has handed out on a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def device_gauge(device: torch.device) -> Iterator[Gauge]:
    """The gauge of a device: a GPU's allocator, or a count of what runs inside the block."""
    if device.type == "cuda":
        yield CudaGauge(device)
    else:
        with AllocationCounter() as counter:
            yield counter


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes: the most that was alive, and the most that was added to what was alive when the phase began."""

    peak: int
    added: int


class PhaseMeter:
    """Hooks into the layers and the head of `model`, sharded or not. Between `finish_step` and `start_step` it sleeps."""

    def __init__(self, model: Llama, gauge: Gauge):
        self._gauge, self._phase, self._begin = gauge, None, 0
        self._phases: dict[str, PhaseMemory] = {}
        self.last_step: dict[str, PhaseMemory] = {}  # in the order in which phases began
        self.start_bytes = 0  # alive when the last step began
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: self.mark("layer forward"))
            layer.register_forward_hook(self._layer_done, prepend=True)  # before FSDP frees the weights
        model.output_head.register_forward_pre_hook(lambda *_: self.mark("head"))
        model.output_head.register_forward_hook(lambda *_: self.mark(BETWEEN), prepend=True)

    def start_step(self) -> None:
        self._phases, self._phase = {}, None
        self._enter("embedding")
        self.start_bytes = self._begin

    def mark(self, phase: str) -> None:
        """A phase begins, if a step is on."""
        if self._phase is not None:
            self._leave()
            self._enter(phase)

    def finish_step(self) -> None:
        self._leave()
        self._phase, self.last_step = None, self._phases

    def _enter(self, phase: str) -> None:
        self._phase, self._begin = phase, self._gauge.live_bytes()
        self._gauge.reset_peak()

    def _leave(self) -> None:
        peak, former = self._gauge.peak_bytes(), self._phases.get(self._phase, PhaseMemory(0, 0))
        self._phases[self._phase] = PhaseMemory(max(former.peak, peak), max(former.added, peak - self._begin))

    def _layer_done(self, layer: nn.Module, arguments: tuple, h_Td: Tensor) -> None:
        self.mark(BETWEEN)
        if h_Td.grad_fn is not None:  # the layer's one node
            h_Td.grad_fn.register_prehook(lambda *_: self.mark("layer backward"))
            h_Td.grad_fn.register_hook(lambda *_: self.mark(BETWEEN))


@contextmanager
def memory_history(path: str | None, device: torch.device) -> Iterator[None]:
    """Writes the GPU's allocations of the block to `path`, also when it fails; docs.pytorch.org/memory_viz shows them.

    `path` None: nothing. Raises ValueError naming --record-memory-history without a GPU.
    """
    if path is None:
        yield
        return
    if device.type != "cuda":
        raise ValueError(
            f"--record-memory-history {path} records the allocator of a GPU, and this run is on the {device.type}; without it, "
            "or with --device cuda where there is a GPU, it works"
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS, stacks="python", device=device)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
        print(f"memory history of up to {HISTORY_EVENTS:,} allocations: {path}; docs.pytorch.org/memory_viz shows it", flush=True)
