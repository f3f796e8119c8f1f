"""Seconds of a training step on one rank, from the work that was counted and the speeds of a GPU.

    time = predict_step_time(job, plans, speeds_of("H100"), micro_batches=1)
    time.seconds, time.tokens_per_s_per_gpu                # 224.5, 583.9
    time.parts                                             # {"attention forward": 54.1, …, "host copies": 0.0, …}; they add up

Worked example, Llama3-8B on 8 ranks, 1M tokens, U = 8: a rank's attention is 4 heads of 5.5e11 pairs a layer, 1.13e15 FLOPs forward
and 2.5 times that backward: 6.4 s a layer. A layer's 2 u for the host, 2.1 GB, take 0.04 s and hide under it;
the 5 u of h that come back while the backward projects take 0.1 s and hide under 0.03.

What projections read comes tile by tile, one tile ahead, and hides under the projections alone. Another copy hides as far as the rest
of its layer's pass computes and sends at least as long; a gather or a reduction under the layer beside it. An all-to-all hides under
the attention of the stage before it where the plan prefetches, else not at all.
"""

from dataclasses import dataclass

from megacp.memory.policy import DISK, HOST, LayerPlan
from megacp.planner import GRADIENT_BYTES, Job, count_step
from megacp.planning.work import OTHER, Work
from megacp.training.metrics import model_flops_per_step, peak_flops
from megacp.training.speeds import HOST_NORM, HOST_UPDATE, Speeds

UPDATE_BYTES, NORM_BYTES = 28, 12  # of memory per parameter: AdamW reads 16 and writes 12; the norm and the clipping
COMPUTED = ("attention forward", "attention backward", "projections", "mlp", "output projection", "head")
EXPOSED = ("all-to-all", "host copies", "disk", "FSDP", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """`parts` add up to `seconds`. `executed_flops`: of this rank, recompute included; `mfu`: model FLOPs against the peak."""

    parts: dict[str, float]
    tokens: int
    executed_flops: float
    mfu: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.seconds


def predict_step_time(job: Job, plans: list[LayerPlan], speeds: Speeds, micro_batches: int = 1) -> StepTime:
    """A step of `micro_batches` forward and backward passes; sequences are one document each."""
    counted = count_step(job, plans)
    parts = dict.fromkeys(COMPUTED + EXPOSED, 0.0)
    layer_weights = job.config.layer_parameters()
    for layer, plan in zip(counted.layers, plans):
        reduced = GRADIENT_BYTES * layer_weights
        for work, fsdp_bytes in ((layer.forward_work, 0), (layer.backward_work, reduced)):
            for part, seconds in _pass(job, plan, work, layer_weights * job.dtype.itemsize + fsdp_bytes, speeds).items():
                parts[part] += seconds
    parts["head"] = counted.head.work.gemm_flops["head"] / speeds.gemm["head"]
    parts = {part: micro_batches * seconds for part, seconds in parts.items()}
    shard = job.config.parameter_count() / job.sharding_ranks
    update, norm = (HOST_UPDATE, HOST_NORM) if job.states_on_host else (speeds.device_memory, speeds.device_memory)
    parts["optimizer"] = shard * (UPDATE_BYTES / update + NORM_BYTES / norm)
    tokens = micro_batches * job.tokens
    seconds = sum(parts.values())
    return StepTime(parts, tokens, micro_batches * counted.flops, _model_flops(job) * micro_batches / seconds / peak_flops(speeds.gpu))


def _pass(job: Job, plan: LayerPlan, work: Work, fsdp_bytes: int, speeds: Speeds) -> dict[str, float]:
    """Seconds of one layer's forward or backward by part."""
    forward, backward = speeds.attention_seconds(work)
    computed = {
        "attention forward": forward,
        "attention backward": backward,
        **{part: work.gemm_flops[part] / speeds.gemm[part] for part in ("projections", "mlp")},
        "output projection": work.gemm_flops[OTHER] / speeds.gemm[OTHER],
    }
    gpus = job.schedule.ulysses_degree
    sent = sum(n * speeds.all_to_all_seconds(bytes_, gpus) for bytes_, n in work.messages.items())
    calls = sum((work.attention_forward + work.attention_backward).values())
    hidden = min(sent, forward + backward) * (1 - 1 / max(calls, 1)) if plan.prefetch else 0.0
    busy = sum(computed.values()) + sent - hidden
    projecting, rest = computed["projections"], busy - computed["projections"]
    to_host, from_host, read = _copied(plan, work, [HOST, DISK])
    to_disk, from_disk, read_of_disk = _copied(plan, work, [DISK])
    fsdp = speeds.gather_seconds(fsdp_bytes, job.sharding_ranks)
    if job.states_on_host:  # each rank's shard comes from the host, and its gradients go there
        fsdp += fsdp_bytes / job.sharding_ranks / speeds.host_copy
    return computed | {
        "all-to-all": sent - hidden,
        "host copies": max(0.0, read / speeds.host_copy - projecting)
        + max(0.0, max(to_host, from_host - read) / speeds.host_copy - rest),
        "disk": max(0.0, read_of_disk / speeds.disk - projecting)
        + max(0.0, (to_disk + from_disk - read_of_disk) / speeds.disk - rest),
        "FSDP": max(0.0, fsdp - busy),
    }


def _copied(plan: LayerPlan, work: Work, places: list[str]) -> tuple[int, int, int]:
    """Bytes of what lives in `places`: that leave the device, that come in, and of these what projections read."""
    moved = {"out": 0, "in": 0}
    for (name, way), bytes_ in work.copies.items():
        moved[way] += bytes_ if getattr(plan, name) in places else 0
    return moved["out"], moved["in"], sum(n for name, n in work.projection_reads.items() if getattr(plan, name) in places)


def _model_flops(job: Job) -> float:
    """Of this rank's share of a micro-batch."""
    ranks = job.schedule.ulysses_degree
    length = ranks * job.tokens // job.sequences
    pairs = job.sequences * (length * (length + 1) // 2)
    return model_flops_per_step(job.config, ranks * job.tokens, pairs) / ranks
