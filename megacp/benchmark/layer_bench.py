"""One decoder layer of one rank, forward and backward, alone on one device; its exchanges are copies within the device.

    case = LayerCase(preset("llama3-8b"), ranks=8, seq_length=1048576, heads_per_stage=8, activation_memory="lean")
    bench = LayerBench(case, torch.device("cuda"), torch.bfloat16, gauge)
    repetition = bench.run()               # seconds and peaks of one forward and one backward
    row = layer_row(case, bench, repetitions, ceilings)     # medians, tokens/s/GPU, TFLOP/s, GiB and u

The layer is the one that trains, with its activation store, tiles and stages; `stand_in` is the Ulysses group. Tokens
per second are scaled to the model's layers: tokens of a rank / (layers x seconds of one); embedding, output head, optimizer and
FSDP's collectives are not in it. Peaks in u, one `[T, d]` of the rank in the compute dtype, are above the layer's weights and, in
the backward, above their fp32 gradient sums, as in a rehearsal's report.
"""

import statistics
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from megacp.benchmark.ceilings import Ceilings
from megacp.benchmark.clock import seconds_of
from megacp.benchmark.stand_in import stand_in
from megacp.benchmark.work import attention_flops, equal_borders, layer_model_flops
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import HeadSchedule, build_head_schedule
from megacp.kernels.attention import Documents, select_backend
from megacp.kernels.rotary import attention_factor, inverse_frequencies
from megacp.memory.policy import RECOMPUTE, LayerPlan, plan_of
from megacp.memory.store import ActivationStore, Geometry
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.model.decoder_layer import DecoderLayer
from megacp.model.layer_context import LayerContext
from megacp.planning.work import WorkCounter
from megacp.training.memory_phases import Gauge
from megacp.training.metrics import causal_pairs
from megacp.training.step import widest_attention_call

INPUT_STD = 0.5  # of the random hidden states


@dataclass(frozen=True)
class LayerCase:
    """What is measured. `query_chunk` and `tile_size` in tokens of a rank; `documents` of equal length share the stream.

    `prefetch`: as --upipe-prefetch.
    """

    config: ModelConfig
    ranks: int
    seq_length: int
    heads_per_stage: int
    activation_memory: str = "gpu"
    recompute: str = "selective"
    query_chunk: int | None = None
    tile_size: int = 8192
    documents: int = 1
    backend: str = "auto"
    disk_directory: str | None = None
    prefetch: int = 0

    @property
    def tokens(self) -> int:
        """T, of the rank."""
        return self.seq_length // self.ranks

    @property
    def method(self) -> str:
        return "a2a" if self.heads_per_stage == self.config.num_attention_heads else f"upipe U={self.heads_per_stage}"

    @property
    def plan(self) -> LayerPlan:
        return plan_of(self.activation_memory, self.recompute, self.prefetch)

    @property
    def plan_name(self) -> str:
        return self.activation_memory + {"none": ", no recompute", "selective": "", "full": ", recompute"}[self.recompute]

    @property
    def schedule(self) -> HeadSchedule:
        config = self.config
        return build_head_schedule(config.num_attention_heads, config.num_query_groups, self.ranks, self.heads_per_stage)

    @property
    def borders(self) -> tuple[int, ...]:
        return equal_borders(self.seq_length, self.documents)

    @property
    def model_flops(self) -> int:
        """Of one forward and backward on this rank."""
        return layer_model_flops(self.config, self.tokens, causal_pairs(self.borders), self.ranks)

    @property
    def attention_flops(self) -> tuple[int, int]:
        """Executed on this rank in the forward and in the backward, which runs the forward again where the plan says so."""
        config = self.config
        forward, backward = attention_flops(config.num_attention_heads, config.kv_channels, causal_pairs(self.borders))
        again = forward if self.plan.output == RECOMPUTE else 0
        return forward // self.ranks, (backward + again) // self.ranks

    def describe(self) -> dict:
        """The columns that tell rows apart."""
        return {
            "model": self.config.name, "ranks": self.ranks, "seq_length": self.seq_length, "documents": self.documents,
            "method": self.method, "heads_per_stage": self.heads_per_stage, "plan": self.plan_name,
            "prefetch": int(self.plan.prefetch), "query_chunk": self.query_chunk, "mlp_tile_size": self.tile_size,
        }  # fmt: skip


@dataclass(frozen=True)
class Repetition:
    """Seconds of one layer, and bytes alive at the most: in all, and above what was there before the first layer's input."""

    forward_s: float
    backward_s: float
    forward_peak: int
    backward_peak: int
    forward_added: int
    backward_added: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class LayerBench:
    """`layers` layers with random weights and all they are called with. Raises ValueError when the case cannot run here."""

    def __init__(self, case: LayerCase, device: torch.device, dtype: torch.dtype, gauge: Gauge, layers: int = 1):
        self.case, self.device, self.dtype, self.gauge = case, device, dtype, gauge
        config, documents = case.config, Documents(case.borders)
        q_heads, kv_heads = widest_attention_call(case.schedule)
        self.backend = select_backend(
            case.backend, device, dtype, config.kv_channels, q_heads, kv_heads, documents, query_chunks=case.query_chunk is not None
        ).name
        self.layers = [DecoderLayer(config, number, device=device, dtype=dtype) for number in range(layers)]
        for parameter in (parameter for layer in self.layers for parameter in layer.parameters()):
            with torch.no_grad():
                parameter.normal_(std=config.init_method_std) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.context = layer_context(case, self.backend, device, dtype, layers)
        self.last_gradient: torch.Tensor | None = None
        _take_workspaces(device)

    def run(self, around=None, layers: int = 1) -> Repetition:
        """One repetition: the first `layers` layers forward one after another, then backward, as in a step.

        `around`, for a profiler: called with the name of a phase, gives a context that the phase runs in.
        """
        gauge, config, chosen = self.gauge, self.case.config, self.layers[:layers]
        self.last_gradient = None
        base = gauge.live_bytes()
        h_Td = torch.empty(self.case.tokens, config.hidden_size, dtype=self.dtype, device=self.device).normal_(std=INPUT_STD)
        h_Td.requires_grad_()
        out = []
        gauge.reset_peak()
        forward_s = self._timed("forward", around, lambda: out.append(self._forward(chosen, h_Td)))
        forward_peak = gauge.peak_bytes()
        g_Td = out[0].detach()  # the gradient takes the output's memory, as the next layer leaves it
        g_Td.normal_()
        inputs, gradients = (h_Td, *(parameter for layer in chosen for parameter in layer.parameters())), []
        gauge.reset_peak()
        backward_s = self._timed("backward", around, lambda: gradients.extend(torch.autograd.grad(out.pop(), inputs, g_Td)))
        backward_peak = gauge.peak_bytes()
        self.last_gradient = gradients[0]
        return Repetition(
            forward_s / layers, backward_s / layers, forward_peak, backward_peak, forward_peak - base, backward_peak - base
        )

    def _forward(self, layers: list[DecoderLayer], h_Td: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            h_Td = layer(h_Td, self.context)
        return h_Td

    def _timed(self, phase, around, call) -> float:
        if around is None:
            return seconds_of(call, self.device)
        with around(phase):
            return seconds_of(call, self.device)

    def check_finite(self) -> None:
        """Raises ArithmeticError when the last gradient has a number that is none: such a row's seconds are worth nothing."""
        if not torch.isfinite(self.last_gradient.sum()):
            raise ArithmeticError(f"the gradient of the layer's input is not finite (attention {self.backend})")


def _take_workspaces(device: torch.device) -> None:
    """cuBLAS takes 32 MiB at the first product of a thread, and backward runs in one of its own: not to be counted as a layer's."""
    small = torch.ones(8, 8, device=device, requires_grad=True)
    (small @ small).sum().backward()


def layer_context(case: LayerCase, backend: str, device: torch.device, dtype: torch.dtype, layers: int = 1) -> LayerContext:
    """What layers are called with on rank 0, with an activation store for so many."""
    config, schedule = case.config, case.schedule
    group, documents = stand_in(case.ranks, device), Documents(case.borders)
    attention = AttentionSettings(schedule, group, documents, config.kv_channels**-0.5, backend, case.query_chunk)
    geometry = Geometry.of(config, schedule, case.tokens, case.tile_size, dtype)
    return LayerContext(
        attention,
        torch.arange(case.tokens, device=device),
        inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling, device),
        attention_factor(config.rope_scaling),
        case.tile_size,
        ActivationStore([case.plan] * layers, geometry, device, case.disk_directory),
    )


def layer_row(case: LayerCase, bench: LayerBench, first: Repetition, repetitions: list[Repetition], ceilings: Ceilings) -> dict:
    """Figures of a case: medians of `repetitions` by their sum. Memory is that of `first`, a repetition of one layer."""
    forward_s = statistics.median(r.forward_s for r in repetitions)
    backward_s = statistics.median(r.backward_s for r in repetitions)
    seconds = statistics.median(r.seconds for r in repetitions)
    u = case.tokens * case.config.hidden_size * bench.dtype.itemsize
    weight_gradients = 4 * case.config.layer_parameters()
    return {
        "attention": bench.backend,
        "first_s": first.seconds,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "seconds": seconds,
        "spread": (max(r.seconds for r in repetitions) - min(r.seconds for r in repetitions)) / seconds,
        "repeats": len(repetitions),
        "tokens_per_s_per_gpu": case.tokens / (case.config.num_layers * seconds),
        "model_tflops": case.model_flops / seconds / 1e12,
        "matmul_share": case.model_flops / seconds / ceilings.matmul,
        "peak_gib": max(first.forward_peak, first.backward_peak) / GIB,
        "forward_u": first.forward_added / u,
        "backward_u": (first.backward_added - weight_gradients) / u,
        "weight_gradients_gib": weight_gradients / GIB,
        "u_gib": u / GIB,
    }


def gemm_flops(case: LayerCase) -> tuple[int, int]:
    """Executed in matrix products outside attention, forward and backward, recompute counted.

    The layer runs on the meta device and its products are counted, so this stays true when the layer's schedule changes. One tile
    is enough: products are linear in the tokens. A file takes no meta tensors, so what would be on disk is
    on the host, which changes no product.
    """
    meta, dtype, tokens = torch.device("meta"), torch.bfloat16, min(case.tile_size, case.tokens)
    times, memory = Fraction(case.tokens, tokens), case.activation_memory
    memory = "host" if memory == "disk" else memory
    case = replace(case, seq_length=case.ranks * tokens, documents=1, query_chunk=None, activation_memory=memory)
    layer = DecoderLayer(case.config, 0, device=meta, dtype=dtype)
    context = layer_context(case, "stub-fa4", meta, dtype)
    h_Td = torch.empty(case.tokens, case.config.hidden_size, dtype=dtype, device=meta, requires_grad=True)
    with WorkCounter() as counter:
        out_Td = layer(h_Td, context)
        forward = counter.take()
        out_Td.backward(torch.empty_like(out_Td))
        backward = counter.take()
    return tuple(int(sum(work.gemm_flops.values()) * times) for work in (forward, backward))
