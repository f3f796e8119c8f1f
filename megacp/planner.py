"""Predicted memory of one rank, from the code that runs: a layer goes forward and backward on the meta device, and is counted.

    job = Job(config, schedule, tokens=131072, sharding_ranks=8, tile_size=8192, loss_tile_size=4096, dtype=torch.bfloat16)
    prediction = predict(job, [PLANS["lean"]] * 32)
    prediction.device_bytes, prediction.host_bytes, prediction.parts      # peak; pinned; {"states": …, "buffers": …}
    prediction.moment, prediction.buffers                                 # "layer backward", {"k, v": …, "dxn": …}: the buffers by name

There is no second model of the layer here to fall behind: allocations are those of `megacp.model.decoder_layer`, at their true size
(of like tiles and query chunks a few are run: `megacp.planning.few_tiles`), with the attention kernel's own workspace from
`megacp.kernels.attention.stub` and the exchanges through `Loopback`.

Worked example, Llama3-8B on 8 ranks, 1M tokens, U = 8, tiles of 4,096 (u = 1 GiB): a layer's backward peaks at 6.5 u above its fp32
weight-gradient sums with everything on the device, its own h and the outputs not yet done (1.5 u) among them; at 4.1 u with `lean`.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from megacp.context_parallel.all_to_all import Loopback
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.kernels.attention import Documents
from megacp.kernels.precision import compute_dtype
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
from megacp.planning.few_tiles import FewChunks, FewRows, FewTiles, Loops, NotPeriodic, few_loss_tiles, switches
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
    def on_gpu(self) -> bool:
        """Half precision is for GPUs: allocations are those of their kernels (`megacp.kernels.triton_support.is_predicted`)."""
        return self.dtype in (torch.bfloat16, torch.float16)

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
    moment: str  # "layer forward", "layer backward", "head" or "embedding backward"
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())


def predict(job: Job, plans: list[LayerPlan]) -> Prediction:
    """The peak of a training step whose layer `i` keeps its activations by `plans[i]`."""
    return _prediction(job, plans, max(_moments(job, plans), key=lambda moment: moment.total))


def predict_phases(job: Job, plans: list[LayerPlan]) -> dict[str, Prediction]:
    """The peak of each kind of moment by its name: "layer forward", "layer backward", "head", "embedding backward"."""
    ascending = sorted(_moments(job, plans), key=lambda moment: moment.total)
    return {name: _prediction(job, plans, peak) for name, peak in {moment.name: moment for moment in ascending}.items()}


def layer_totals(job: Job, plans: list[LayerPlan]) -> tuple[list[float], list[float]]:
    """Bytes on the device beside the states, at the most of each layer's forward, and of each layer's backward."""
    moments = _moments(job, plans)
    forward, backward = ([m.total for m in moments if m.name == name] for name in ("layer forward", "layer backward"))
    return forward, backward


def _prediction(job: Job, plans: list[LayerPlan], peak: "_Moment") -> Prediction:
    parts = {
        "states": 0 if job.states_on_host else STATE_BYTES * job.config.parameter_count() // job.sharding_ranks,
        "gradients": 0 if job.states_on_host else GRADIENT_BYTES * peak.gradients // job.sharding_ranks,
        "gathered weights": peak.weights,
        "gradient reduction": peak.reduction,
        "kept activations": peak.kept,
        "buffers": sum(peak.buffers.values()),
    }
    return Prediction(parts, peak.buffers, peak.name, job.host_bytes(plans), planned_bytes(plans, job.geometry, DISK))


@dataclass(frozen=True)
class _Moment:
    """Bytes on the device beside the states; `gradients`: parameters whose shards of gradients are there, `total` counts these."""

    name: str
    weights: int  # gathered by FSDP
    reduction: int  # gradients on their way to their shards
    gradients: int
    kept: int
    buffers: dict[str, int]
    total: float


def _moments(job: Job, plans: list[LayerPlan]) -> list[_Moment]:
    """Where a step can be at its peak: forward and backward of each layer, the head, its gradient, and that of the embedding.

    FSDP gathers into a buffer and copies from it: going forward the layer's own buffer is there until the next one's, going backward
    that of the layer before, gathered ahead. A layer's fp32 gradients stay until the next ones to come are ready. Tied embeddings stay
    gathered from first to last, and with them the head's part of their gradient waits for the embedding's.
    """
    config, itemsize, peaks = job.config, job.dtype.itemsize, {plan: layer_peaks(job, plan) for plan in set(plans)}
    tied = not config.untie_embeddings_and_output_weights
    layer_weights, layers = config.layer_parameters() * itemsize, len(plans)
    table_size = config.vocab_size * config.hidden_size
    table, stays = table_size * itemsize, table_size * itemsize if tied else 0
    layer_reduction, table_reduction = (GRADIENT_BYTES * size for size in (config.layer_parameters(), table_size))
    on_device = 0 if job.states_on_host else GRADIENT_BYTES / job.sharding_ranks

    def moment(name: str, weights: int, reduction: int, gradients: int, kept: int, buffers: dict[str, int]) -> _Moment:
        if job.accumulates:
            gradients = config.parameter_count()
        total = weights + reduction + gradients * on_device + kept + sum(buffers.values())
        return _Moment(name, weights, reduction, gradients, kept, buffers, total)

    moments, kept_before = [], 0
    for number, plan in enumerate(plans):
        layer = peaks[plan]
        moments.append(moment("layer forward", 2 * layer_weights + stays, 0, 0, kept_before, layer.forward_parts))
        buffers = dict(layer.backward_parts)
        kept = kept_before + buffers.pop(KEPT_NAME)
        kept_before += layer.kept
        ahead = layer_weights if number else table - stays
        before = layer_reduction if number < layers - 1 else 0 if tied else table_reduction
        done = (layers - 1 - number) * config.layer_parameters() + (0 if tied else table_size)
        moments.append(moment("layer backward", layer_weights + ahead + stays, before + stays, done, kept, buffers))
    head_weights = stays + layer_weights if tied else 2 * table
    moments.append(moment("head", head_weights, 0, 0, kept_before, head_count(job).parts))
    if not tied:  # its weight given back, its gradient is copied to where the ranks sum theirs
        buffers = {"residual gradient": job.unit, "weight gradients": GRADIENT_BYTES * table_size}
        moments.append(moment("head backward", layer_weights, table_reduction, table_size, kept_before, buffers))
    buffers = {"residual gradient": job.unit, "gradient of the embedding": table}
    if job.on_gpu:
        # PyTorch's kernel sums in fp32 by distinct token: so many of T tokens drawn alike; text has fewer.
        distinct = config.vocab_size * -math.expm1(-job.tokens / config.vocab_size)
        buffers["sums by token"] = int(distinct) * config.hidden_size * 4
    moments.append(moment("embedding backward", table, table_reduction, layers * config.layer_parameters(), 0, buffers))
    return moments


class DeviceTooSmall(ValueError):
    """A step does not fit on the device, wherever its activations are."""


def choose_plans(
    job: Job, device_limit: int, host_limit: int | None, disk_limit: int | None, full: bool, prefetch: int = 0
) -> list[LayerPlan]:
    """The fastest plans, one a layer, within the limits in bytes of one rank. `disk_limit` 0: no disk; None elsewhere: no limit.

    What costs least first: all on the device; then the first layers' activations in host memory, as few layers as need be (the last
    layers' are needed first and briefest); then also the backward's residual gradient through the host. What the host cannot take of
    the first layers goes to disk. `full`: attention runs again where activations leave the device, which halves what is kept there.
    Raises ValueError that says what is missing, DeviceTooSmall when no room on the host or disk would help.
    """
    layers, least, device_has_room = job.config.num_layers, math.inf, False
    for lean in (False, True):
        gradients = dict(prefetch=bool(prefetch), **(dict(residual_grad=HOST) if lean else {}))
        near, far, farther = LayerPlan(**gradients), LayerPlan(HOST, HOST, HOST, **gradients), LayerPlan(DISK, DISK, HOST, **gradients)
        if full:
            far, farther = (replace(plan, output=RECOMPUTE, lse=RECOMPUTE) for plan in (far, farther))
        for away in range(layers + 1):
            plans = [far] * away + [near] * (layers - away)
            device = predict(job, plans).device_bytes
            if device <= device_limit:
                break
        else:
            least = min(least, device)
            continue
        device_has_room = True
        for on_disk in range(away + 1):
            plans = [farther] * on_disk + [far] * (away - on_disk) + [near] * (layers - away)
            host, disk = job.host_bytes(plans), planned_bytes(plans, job.geometry, DISK)
            if (host_limit is None or host <= host_limit) and (disk_limit is None or disk <= disk_limit):
                return plans
    if not device_has_room:
        raise DeviceTooSmall(
            f"the step needs {least / GIB:.2f} GiB of GPU memory even with all activations elsewhere, more than the "
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
            places += ", products kept" if plans[first].products else ""
            lines.append(f"layers {first}-{layer - 1}: {places}" if layer - first > 1 else f"layer {first}: {places}")
            first = layer
    return lines


def layer_peaks(job: Job, plan: LayerPlan) -> LayerCount:
    """One layer, counted. On the device it makes no difference whether the rest is on host or disk, nor how many layers there are."""
    job = replace(job, config=replace(job.config, num_layers=1))
    return count_layer(job, replace(plan, **{name: HOST for name in KEPT if getattr(plan, name) == DISK}))


@lru_cache(maxsize=256)
def count_layer(job: Job, plan: LayerPlan) -> LayerCount:
    """One layer, forward and backward, of whose loops the ends are run where that tells all."""
    try:
        return run_layer(job, plan)
    except NotPeriodic:
        return run_layer(job, plan, every_step=True)


def run_layer(job: Job, plan: LayerPlan, every_step: bool = False) -> LayerCount:
    """Runs one layer on the meta device; of its loops all, or the ends, which raises NotPeriodic where these are not enough."""
    config = job.config
    layer = DecoderLayer(config, 0, device=META, dtype=job.dtype)
    for weight in layer.parameters():
        weight.grad_dtype = compute_dtype(weight.dtype)  # as in training: the sums go into the reduction as they are
    ranks = job.schedule.ulysses_degree
    sequence = ranks * job.tokens // job.sequences
    memory, work = AllocationCounter("meta", buffer_name), WorkCounter()
    settings = dict(
        schedule=job.schedule, group=Loopback(ranks) if ranks > 1 else None,
        documents=Documents(tuple(sequence * i for i in range(job.sequences + 1))), scale=config.kv_channels**-0.5,
        backend=f"stub-{job.kernel}", query_chunk=job.query_chunk,
    )  # fmt: skip
    if every_step:
        attention, geometry, context_of = AttentionSettings(**settings), job.geometry, LayerContext
    else:
        cut = switches(job.schedule, config.kv_channels, settings["documents"], job.query_chunk or job.tokens)
        loops = Loops(job.tokens, job.tile_size, memory, work, job.query_chunk, cut)
        attention, geometry = FewChunks(**settings, loops=loops), FewRows(**vars(job.geometry), loops=loops)
        context_of = partial(FewTiles, loops=loops)
    context = context_of(
        attention, torch.empty(job.tokens, dtype=torch.int64, device=META),
        inverse_frequencies(config.kv_channels, config.rotary_base, device=META), 1.0, job.tile_size,
        ActivationStore([plan], geometry, META),
    )  # fmt: skip
    regions = {id(context.store.region(0, name)): name for name in KEPT}
    with memory, work:
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
    """The head, as `count_layer` a layer."""
    try:
        return run_head(job)
    except NotPeriodic:
        return run_head(job, every_step=True)


def run_head(job: Job, every_step: bool = False) -> HeadCount:
    """Runs the head on the meta device: its input, the gradient of it, a tile, the weight gradient. `every_step` as for a layer."""
    config = job.config
    head = OutputHead(replace(config, untie_embeddings_and_output_weights=True), device=META, dtype=job.dtype)
    memory, work = AllocationCounter("meta", buffer_name), WorkCounter()
    loops = Loops(job.tokens, job.loss_tile_size, memory, work)
    with memory, work, nullcontext() if every_step else few_loss_tiles(loops):
        h_Td = torch.empty(job.tokens, config.hidden_size, dtype=job.dtype, device=META, requires_grad=True)
        labels_T = torch.empty(job.tokens, dtype=torch.int64, device=META)
        head(h_Td, labels_T, 1.0, job.loss_tile_size)
        return HeadCount(memory.peak_holders(), work.take())


@dataclass(frozen=True)
class StepCount:
    """A forward and backward pass of one rank: its layers and its head."""

    layers: list[LayerCount]
    head: HeadCount

    @property
    def _works(self) -> list[Work]:
        return [*(work for layer in self.layers for work in (layer.forward_work, layer.backward_work)), self.head.work]

    @property
    def gemm_flops(self) -> Counter:
        """By part."""
        return sum((work.gemm_flops for work in self._works), Counter())

    @property
    def flops(self) -> float:
        return sum(work.flops for work in self._works)


def count_step(job: Job, plans: list[LayerPlan]) -> StepCount:
    return StepCount([layer_peaks(job, plan) for plan in plans], head_count(job))
