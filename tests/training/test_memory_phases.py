"""Phases of a step's memory: a peak falls into the phase in which it happened."""

import pytest
import torch
from torch import nn

from megacp.training.memory_phases import BETWEEN, PhaseMemory, PhaseMeter, memory_history


class Gauge:
    """Live bytes as the test's model sets them; the peak since the last reset."""

    def __init__(self):
        self.live = self.peak = 0

    def use(self, bytes_):
        self.live += bytes_
        self.peak = max(self.peak, self.live)

    def live_bytes(self):
        return self.live

    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        self.peak = self.live


class _Layer(torch.autograd.Function):
    """Uses and frees `forward` bytes, keeps one; its backward uses `backward`."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.gauge.use(layer.bytes_forward)
        layer.gauge.use(1 - layer.bytes_forward)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.layer.gauge.use(ctx.layer.bytes_backward)
        ctx.layer.gauge.use(-1 - ctx.layer.bytes_backward)
        return g, None


class Layer(nn.Module):
    def __init__(self, gauge, forward, backward):
        super().__init__()
        self.gauge, self.bytes_forward, self.bytes_backward = gauge, forward, backward

    def forward(self, x):
        return _Layer.apply(x, self)


class Head(nn.Module):
    def __init__(self, gauge):
        super().__init__()
        self.gauge = gauge

    def forward(self, x):
        self.gauge.use(50)
        self.gauge.use(-50)
        return x.sum()


class Model(nn.Module):
    def __init__(self, gauge):
        super().__init__()
        self.layers = nn.ModuleList([Layer(gauge, 10, 30), Layer(gauge, 20, 40)])
        self.output_head = Head(gauge)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.output_head(x)


def test_each_peak_is_that_of_its_phase():
    gauge = Gauge()
    gauge.use(100)
    model, x = Model(gauge), torch.ones(2, requires_grad=True)
    meter = PhaseMeter(model, gauge)
    model(x).backward()  # no step is on: nothing is noted
    assert meter.last_step == {}
    for _ in range(2):
        meter.start_step()
        model(x).backward()
        gauge.use(7)
        meter.mark("optimizer")
        gauge.use(3)
        gauge.use(-10)
        meter.finish_step()
        assert meter.start_bytes == 100
        assert meter.last_step == {
            "embedding": PhaseMemory(100, 0),
            "layer forward": PhaseMemory(121, 20),
            BETWEEN: PhaseMemory(107, 7),
            "head": PhaseMemory(152, 50),
            "layer backward": PhaseMemory(142, 40),
            "optimizer": PhaseMemory(110, 3),
        }


def test_a_memory_history_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="--record-memory-history .*h.pickle records the allocator of a GPU.*on the cpu"):
        with memory_history(str(tmp_path / "h.pickle"), torch.device("cpu")):
            pytest.fail("the run began")
    with memory_history(None, torch.device("cpu")):
        pass
    assert not any(tmp_path.iterdir())
