"""Predicted memory of one rank, from the code that runs: a layer goes forward and backward on the meta device, and is counted.

    job = Job(config, schedule, tokens=131072, sharding_ranks=8, tile_size=8192, loss_tile_size=4096, dtype=torch.bfloat16)
    prediction = predict(job, [PLANS["lean"]] * 32)
    prediction.device_bytes, prediction.host_bytes, prediction.parts      # peak; pinned; {"states": …, "buffers": …}

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
from megacp.planning.host_states import host_state_bytes

STATE_BYTES, GRADIENT_BYTES = 4 + 8, 4  # per parameter, sharded, fp32: master weight and AdamW's two moments; gradient
META = torch.device("meta")


@dataclass(frozen=True)
class Job:
    """What the memory of a rank depends on besides the plans. `tokens` are the rank's; `kernel` is the attention backend.

    `accumulates`: several micro-batches a step, so that all gradients are there before the last backward begins. `states_on_host`:
    weights, moments and gradients of this rank are in host memory (--optimizer-cpu-offload).
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
class LayerPeaks:
    """Bytes of one layer on the device, above weights. `kept`: between forward and backward; peaks contain it and `h` or its gradient.

    The backward's peak has the layer's fp32 weight-gradient sums in it.
    """

    forward: int
    backward: int
    kept: int


@dataclass(frozen=True)
class Prediction:
    """Bytes of one rank at its peak, in parts that add up to `device_bytes`."""

    parts: dict[str, int]
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

    kept_before, moments = 0, []
    for number, plan in enumerate(plans):
        layer = peaks[plan]
        moments.append((kept_before, layer.forward, gradients(0)))
        moments.append((kept_before + layer.kept, layer.backward - layer.kept, gradients(len(plans) - 1 - number)))
        kept_before += layer.kept
    moments.append((kept_before, head_peak(job), gradients(0)))
    kept, buffers, gradient_shards = max(moments, key=sum)
    parts = {
        "states": 0 if job.states_on_host else STATE_BYTES * config.parameter_count() // job.sharding_ranks,
        "gradients": gradient_shards,
        # FSDP gathers the next layer while one runs; the ends stay, as its root unit or near their use.
        "gathered weights": (2 * layer_parameters + ends) * itemsize,
        # One layer's gradients on their way: as autograd hands them over, and in fp32 for the reduction.
        "gradient reduction": layer_parameters * (itemsize + 4),
        "kept activations": kept,
        "buffers": buffers,
    }
    return Prediction(parts, job.host_bytes(plans), planned_bytes(plans, job.geometry, DISK))


def choose_plans(job: Job, device_limit: int, host_limit: int | None, disk_limit: int | None, full: bool) -> list[LayerPlan]:
    """The fastest plans, one a layer, within the limits in bytes of one rank. `disk_limit` 0: no disk; None elsewhere: no limit.

    What costs least first: all on the device; then the first layers' activations in host memory, as few layers as need be (the last
    layers' are needed first and briefest); then also the backward's residual gradient through the host. What the host cannot take of the
    first layers goes to disk. `full`: attention runs again where activations leave the device, which halves what is kept there.
    Raises ValueError that says what is missing.
    """
    layers, shortest = job.config.num_layers, None
    for lean in (False, True):
        gradients = dict(residual_grad=HOST) if lean else {}
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
            lines.append(f"layers {first}-{layer - 1}: {places}" if layer - first > 1 else f"layer {first}: {places}")
            first = layer
    return lines


@lru_cache(maxsize=256)
def layer_peaks(job: Job, plan: LayerPlan) -> LayerPeaks:
    """Runs one layer on the meta device and counts. On the device it makes no difference whether the rest is on host or disk."""
    plan = replace(plan, **{name: HOST for name in KEPT if getattr(plan, name) == DISK})
    config = job.config
    layer = DecoderLayer(config, 0, device=META, dtype=job.dtype)
    ranks = job.schedule.ulysses_degree
    attention = AttentionSettings(
        job.schedule, Loopback(ranks) if ranks > 1 else None, Documents((0, ranks * job.tokens)), config.kv_channels**-0.5,
        f"stub-{job.kernel}", job.query_chunk,
    )  # fmt: skip
    context = LayerContext(
        attention, torch.empty(job.tokens, dtype=torch.int64, device=META),
        inverse_frequencies(config.kv_channels, config.rotary_base, device=META), 1.0, job.tile_size,
        ActivationStore([plan], job.geometry, META),
    )  # fmt: skip
    with AllocationCounter("meta") as counter:
        h_Td = torch.empty(job.tokens, config.hidden_size, dtype=job.dtype, device=META, requires_grad=True)
        out_Td = layer(h_Td, context)
        forward = counter.peak_bytes()
        del h_Td
        residual = job.unit  # the layer's output: the next layer's input, counted there if that keeps it
        kept = counter.live_bytes() - residual
        g_Td = torch.empty_like(out_Td)
        counter.reset_peak()
        out_Td.backward(g_Td)
        return LayerPeaks(forward, counter.peak_bytes() - residual, kept)


@lru_cache(maxsize=64)
def head_peak(job: Job) -> int:
    """Bytes of the output head above weights and kept activations: its input, the gradient of it, a tile, the weight gradient."""
    config = job.config
    head = OutputHead(replace(config, untie_embeddings_and_output_weights=True), device=META, dtype=job.dtype)
    with AllocationCounter("meta") as counter:
        h_Td = torch.empty(job.tokens, config.hidden_size, dtype=job.dtype, device=META, requires_grad=True)
        labels_T = torch.empty(job.tokens, dtype=torch.int64, device=META)
        head(h_Td, labels_T, 1.0, job.loss_tile_size)
        return counter.peak_bytes()


