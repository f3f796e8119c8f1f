"""Predicted memory of one rank, from the code that runs: a layer goes forward and backward on the meta device, and is counted.

    job = Job(config, schedule, tokens=131072, sharding_ranks=8, tile_size=8192, loss_tile_size=4096, dtype=torch.bfloat16)
    prediction = predict(job, [PLANS["lean"]] * 32)
    prediction.device_bytes, prediction.host_bytes, prediction.parts      # peak; pinned; {"states": …, "buffers": …}
    prediction.moment, prediction.buffers                                 # "layer backward", {"k, v": …, "dxn": …}: the buffers by name

There is no second model of the layer here to fall behind: allocations are those of `megacp.model.decoder_layer`, at their true size,
with the attention kernel's own workspace from `megacp.kernels.attention.stub` and the exchanges through `Loopback`.

Worked example, Llama3-8B on 8 ranks, 1M tokens, U = 8, tiles of 4,096 (u = 1 GiB): a layer's backward peaks at 6.5 u above its fp32
weight-gradient sums with everything on the device, its own h and the outputs not yet done (1.5 u) among them; at 4.1 u with `lean`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from megacp.context_parallel.all_to_all import Loopback
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.kernels.attention import Documents
from megacp.kernels.rotary import inverse_frequencies
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import DISK, HOST, RECOMPUTE, LayerPlan
from megacp.memory.store import KEPT, SCRATCH, ActivationStore, Geometry, planned_bytes
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.model.decoder_layer import DecoderLayer
from megacp.model.layer_context import LayerContext
from megacp.model.output_head import OutputHead
from megacp.planning.buffer_names import KEPT as KEPT_NAME
from megacp.planning.buffer_names import buffer_name
from megacp.planning.host_states import host_state_bytes
from megacp.planning.work import Work, WorkCounter

STATE_BYTES, GRADIENT_BYTES = 4 + 8, 4  # per parameter, sharded, fp32: master weight and AdamW's two moments; gradient
META = torch.device("meta")


@dataclass(frozen=True)
class Job:
    """What the memory of a rank depends on besides the plans. `tokens` are the rank's; `kernel` is the attention backend.

    `accumulates`: several micro-batches a step, so that all gradients are there before the last backward begins. `states_on_host`:
    weights, moments and gradients of this rank are in host memory (--optimizer-cpu-offload). `sequences`: of a micro-batch, each one
    document.
    """

    config: ModelConfig
    schedule: HeadSchedule
    tokens: int
    sharding_ranks: int
    tile_size: int
    loss_tile_size: int
    dtype: torch.dtype
    query_chunk: int | None = None
    kernel: str = "fa4"
    accumulates: bool = False
    states_on_host: bool = False
    sequences: int = 1

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.config, self.schedule, self.tokens, self.tile_size, self.dtype)

    @property
    def unit(self) -> int:
        """u: bytes of one `[T, d]` tensor."""
        return self.tokens * self.config.hidden_size * self.dtype.itemsize

    @property
    def host_state_bytes(self) -> int:
        """Master weights, moments and gradients that this rank keeps in host memory."""
        return host_state_bytes(self.config, self.sharding_ranks) if self.states_on_host else 0

    def host_bytes(self, plans: list[LayerPlan]) -> int:
        """All that this rank keeps in host memory: activations by `plans`, and states."""
        return self.host_state_bytes + planned_bytes(plans, self.geometry, HOST)


@dataclass(frozen=True)
class LayerCount:
    """Bytes of one layer on the device at the peaks of its forward and backward, by name and above weights; what it computes and moves.

    `kept`: bytes between forward and backward. Peaks contain what is kept then and `h` or its gradient; the backward's also the
    layer's fp32 weight-gradient sums.
    """

    forward_parts: dict[str, int]
    backward_parts: dict[str, int]
    kept: int
    forward_work: Work
    backward_work: Work

    @property
    def forward(self) -> int:
        return sum(self.forward_parts.values())

    @property
    def backward(self) -> int:
        return sum(self.backward_parts.values())


@dataclass(frozen=True)
class Prediction:
    """Bytes of one rank at its peak, in parts that add up to `device_bytes`; its `buffers` by name, and the moment of the peak."""

    parts: dict[str, int]
    buffers: dict[str, int]
    moment: str  # "layer forward", "layer backward" or "head"
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())


def predict(job: Job, plans: list[LayerPlan]) -> Prediction:
    """The peak of a training step whose layer `i` keeps its activations by `plans[i]`.

    It is reached in the backward of a layer, when this and the earlier layers' activations are kept and the later layers' gradients are
    there, or in the output head, when all activations are; or, with few layers, in a forward.
    """
    config = job.config
    layer_parameters, itemsize = config.layer_parameters(), job.dtype.itemsize
    ends = config.vocab_size * config.hidden_size * (2 if config.untie_embeddings_and_output_weights else 1)
    peaks = {plan: layer_peaks(job, plan) for plan in set(plans)}

    def gradients(later_layers: int) -> int:
        if job.states_on_host:
            return 0
        parameters = config.parameter_count() if job.accumulates else later_layers * layer_parameters
        return GRADIENT_BYTES * parameters // job.sharding_ranks

    kept_before, moments = 0, []  # moments: (name, activations kept, buffers by name, gradients)
    for number, plan in enumerate(plans):
        layer = peaks[plan]
        moments.append(("layer forward", kept_before, layer.forward_parts, gradients(0)))
        buffers = dict(layer.backward_parts)
        kept = kept_before + buffers.pop(KEPT_NAME, 0)
        moments.append(("layer backward", kept, buffers, gradients(len(plans) - 1 - number)))
        kept_before += layer.kept
    moments.append(("head", kept_before, head_count(job).parts, gradients(0)))
    moment, kept, buffers, gradient_shards = max(moments, key=lambda at: at[1] + sum(at[2].values()) + at[3])
    parts = {
        "states": 0 if job.states_on_host else STATE_BYTES * config.parameter_count() // job.sharding_ranks,
        "gradients": gradient_shards,
        # FSDP gathers the next layer while one runs; the ends stay, as its root unit or near their use.
        "gathered weights": (2 * layer_parameters + ends) * itemsize,
        # One layer's gradients on their way: as autograd hands them over, and in fp32 for the reduction.
        "gradient reduction": layer_parameters * (itemsize + 4),
        "kept activations": kept,
        "buffers": sum(buffers.values()),
    }
    return Prediction(parts, buffers, moment, job.host_bytes(plans), planned_bytes(plans, job.geometry, DISK))


def choose_plans(
    job: Job, device_limit: int, host_limit: int | None, disk_limit: int | None, full: bool, prefetch: int | None = 0
) -> list[LayerPlan]:
    """The fastest plans, one a layer, within the limits in bytes of one rank. `disk_limit` 0: no disk; None elsewhere: no limit.

    What costs least first: prefetching (`prefetch` None: where there is room; else as it says); all on the device; then the first layers' activations in host memory, as few layers as need be (the last
    layers' are needed first and briefest); then also the backward's residual gradient through the host. What the host cannot take of the
    first layers goes to disk. `full`: attention runs again where activations leave the device, which halves what is kept there.
    Raises ValueError that says what is missing.
    """
    layers, shortest = job.config.num_layers, None
    ways = [(False, True), (False, False), (True, False)] if prefetch is None else [(False, bool(prefetch)), (True, bool(prefetch))]
    for lean, ahead in ways:
        gradients = dict(prefetch=ahead, **(dict(residual_grad=HOST) if lean else {}))
        near, far, farther = LayerPlan(**gradients), LayerPlan(HOST, HOST, HOST, **gradients), LayerPlan(DISK, DISK, HOST, **gradients)
        if full:
            far, farther = (replace(plan, output=RECOMPUTE, lse=RECOMPUTE) for plan in (far, farther))
        for away in range(layers + 1):
            plans = [far] * away + [near] * (layers - away)
            device = predict(job, plans).device_bytes
            if device <= device_limit:
                break
        else:
            shortest = device
            continue
        for on_disk in range(away + 1):
            plans = [farther] * on_disk + [far] * (away - on_disk) + [near] * (layers - away)
            host, disk = job.host_bytes(plans), planned_bytes(plans, job.geometry, DISK)
            if (host_limit is None or host <= host_limit) and (disk_limit is None or disk <= disk_limit):
                return plans
    if shortest is not None:
        raise ValueError(
            f"the step needs {shortest / GIB:.2f} GiB of GPU memory even with all activations elsewhere, more than the "
            f"{device_limit / GIB:.2f} GiB there are"
        )
    states = f", beside {job.host_state_bytes / GIB:.2f} GiB of states on the host" if job.states_on_host else ""
    raise ValueError(f"host and disk cannot take the activations that the GPU has no room for{states}")


def table(plans: list[LayerPlan]) -> list[str]:
    """A line for each run of layers with one plan: `layers 0-19: h host, output host, lse host, …`."""
    lines, first = [], 0
    for layer in range(1, len(plans) + 1):
        if layer == len(plans) or plans[layer] != plans[first]:
            places = ", ".join(f"{name.replace('_', ' ')} {getattr(plans[first], name)}" for name in KEPT + SCRATCH)
            places += ", stages prefetched" if plans[first].prefetch else ""
            lines.append(f"layers {first}-{layer - 1}: {places}" if layer - first > 1 else f"layer {first}: {places}")
            first = layer
    return lines


def layer_peaks(job: Job, plan: LayerPlan) -> LayerCount:
    """One layer, counted. On the device it makes no difference whether the rest is on host or disk."""
    return count_layer(job, replace(plan, **{name: HOST for name in KEPT if getattr(plan, name) == DISK}))


@lru_cache(maxsize=256)
def count_layer(job: Job, plan: LayerPlan) -> LayerCount:
    """Runs one layer on the meta device, forward and backward."""
    config = job.config
    layer = DecoderLayer(config, 0, device=META, dtype=job.dtype)
    ranks = job.schedule.ulysses_degree
    sequence = ranks * job.tokens // job.sequences
    attention = AttentionSettings(
        job.schedule, Loopback(ranks) if ranks > 1 else None, Documents(tuple(sequence * i for i in range(job.sequences + 1))),
        config.kv_channels**-0.5, f"stub-{job.kernel}", job.query_chunk,
    )  # fmt: skip
    context = LayerContext(
        attention, torch.empty(job.tokens, dtype=torch.int64, device=META),
        inverse_frequencies(config.kv_channels, config.rotary_base, device=META), 1.0, job.tile_size,
        ActivationStore([plan], job.geometry, META),
    )  # fmt: skip
    regions = {id(context.store.region(0, name)): name for name in KEPT}
    with AllocationCounter("meta", buffer_name) as memory, WorkCounter() as work:
        h_Td = torch.empty(job.tokens, config.hidden_size, dtype=job.dtype, device=META, requires_grad=True)
        out_Td = layer(h_Td, context)
        forward, forward_work = memory.peak_holders(), work.take(regions)
        del h_Td
        residual = job.unit  # the layer's output: the next layer's input, counted there if that keeps it
        kept = memory.live_bytes() - residual
        memory.rename_live(KEPT_NAME)
        g_Td = torch.empty_like(out_Td)
        memory.reset_peak()
        out_Td.backward(g_Td)
        backward, backward_work = memory.peak_holders(), work.take(regions)
    backward[KEPT_NAME] -= residual
    return LayerCount(forward, backward, kept, forward_work, backward_work)


@dataclass(frozen=True)
class HeadCount:
    """The output head at its peak: bytes by name above weights and kept activations, and its work."""

    parts: dict[str, int]
    work: Work


@lru_cache(maxsize=64)
def head_count(job: Job) -> HeadCount:
    """Runs the head on the meta device: its input, the gradient of it, a tile, the weight gradient."""
    config = job.config
    head = OutputHead(replace(config, untie_embeddings_and_output_weights=True), device=META, dtype=job.dtype)
    with AllocationCounter("meta", buffer_name) as memory, WorkCounter() as work:
        h_Td = torch.empty(job.tokens, config.hidden_size, dtype=job.dtype, device=META, requires_grad=True)
        labels_T = torch.empty(job.tokens, dtype=torch.int64, device=META)
        head(h_Td, labels_T, 1.0, job.loss_tile_size)
        return HeadCount(memory.peak_holders(), work.take())


def head_peak(job: Job) -> int:
    """Bytes of the output head above weights and kept activations."""
    return sum(head_count(job).parts.values())
