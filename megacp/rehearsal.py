"""One rank of a job of many GPUs, on one device: what it would need of memory, and where its time goes.

    python pretrain_llama.py --rehearse-world-size 8 --model llama3-8b --context-parallel-size 8 --seq-length 10485760 \\
        --activation-memory lean --rehearse-attention stub --attention-mask causal --mock-data

    rehearsal  rank 0 of 8, 1,310,720 tokens a rank; u, one [T, d] in bfloat16, is 10.000 GiB; attention stub-fa4; NVIDIA H200
    states     11.218 GiB weights and moments, 3.739 GiB gradients (this rank's shards)
    memory            peak GiB  above states GiB        u
    layer backward           …

The code is that of training: same layers, same FSDP, same store, states sharded as for the whole job. Only the collectives are
fake: every buffer is allocated and filled, from this rank's own data, so numbers stay finite but mean nothing, and an all-to-all
takes as long as a copy. With `stub` attention nothing is computed there either, but its memory is taken. On a CPU allocations
are counted, and a step of more than --gpu-memory-limit-gib ends with the error that a GPU's has. Host and disk
hold one layer of each plan, which all such layers overwrite: the room of all is reported, not taken. With --rehearse-layers K only
K layers compute, and the others take their memory (`megacp.training.idle_layers`).
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from megacp.checkpointing.random_state import seed_random_state
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.memory.copies import Copies
from megacp.memory.policy import DISK, GPU, HOST, LayerPlan
from megacp.memory.store import KEPT, ActivationStore, Geometry, planned_bytes
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.model.llama import Llama
from megacp.parallel_state import ParallelLayout
from megacp.planner import Job
from megacp.planning.host_states import host_state_bytes
from megacp.training import step
from megacp.training.activation_plans import memory_job
from megacp.training.fake_collectives import filled_collectives
from megacp.training.idle_layers import idle_layers
from megacp.training.loop import TrainingRun
from megacp.training.memory_phases import PhaseMemory, PhaseMeter, device_gauge
from megacp.training.metrics import StepRecord, causal_pairs
from megacp.training.optimizer import build_optimizer
from megacp.training.part_times import PartTimer
from megacp.training.rehearsals import job_settings
from megacp.training.run_logs import profiled_steps
from megacp.training.sharding import allocate_weights
from megacp.training.step import StepSettings, step_settings
from megacp.training.training_data import TrainingData
from megacp.training.watchers import step_watchers
from megacp.training.wrapping import wrapped


@dataclasses.dataclass(frozen=True)
class RehearsalReport:
    """Bytes on this rank, seconds of its last step. `states` holds weights and moments; gradients come in during the backward."""

    world_size: int
    rank: int
    device: str
    dtype: str
    attention: str
    tokens_per_rank: int
    layers: int
    computing_layers: list[int]  # their numbers; the others only took their memory
    u: int  # bytes of one [T, d] in the compute dtype
    states: int  # alive before the step
    gradients: int  # where the states are
    host_states: int  # weights, moments and gradients in host memory (--optimizer-cpu-offload, a GPU); else 0
    phases: dict[str, PhaseMemory]
    layer_weight_gradients: int  # fp32, of one layer, whole
    layer_forward: int  # of one layer, its input counted
    layer_backward: int  # of one layer, no weight gradients; its gradient and what it kept counted (by the largest plan)
    reserved: int | None  # by the GPU's allocator, at the most; None on a CPU
    host: int
    disk: int
    step_seconds: float
    part_seconds: dict[str, float]
    tokens_per_s_per_gpu: float | None  # None: not all layers computed
    copy_bytes_per_s: float | None  # between device and pinned memory, each way while both run; None on a CPU
    settings: dict  # what `megacp.training.rehearsals` makes the job of again
    steps: list[dict]  # seconds and (query, key) pairs of each

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases.values())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"peak": self.peak}, indent=2) + "\n"

    def table(self) -> str:
        """For a person."""
        lines = [
            f"{'rehearsal':10} rank {self.rank} of {self.world_size}, {self.tokens_per_rank:,} tokens a rank; u, one [T, d] in "
            f"{self.dtype}, is {_gib(self.u)}; attention {self.attention}; {self.device}",
            f"{'states':10} {_gib(self.states)} weights and moments, {_gib(self.gradients)} gradients (this rank's shards)"
            if not self.host_states
            else f"{'states':10} {_gib(self.host_states)} weights, moments and gradients in host memory (this rank's shards)",
            *self._computing_lines(),
            f"{'elsewhere':10} {_gib(self.host)} of host memory, {_gib(self.disk)} of disk for activations",
            "",
            f"{'memory':16}{'peak GiB':>10}{'above states GiB':>18}{'u':>9}",
        ]
        for name, phase in self.phases.items():
            above = phase.peak - self.states
            lines.append(f"{name:16}{phase.peak / GIB:10.3f}{above / GIB:18.3f}{above / self.u:9.2f}")
        those = " for these layers" if len(self.computing_layers) < self.layers else ""
        reserved = "" if self.reserved is None else f"; the allocator held {_gib(self.reserved)}{those}"
        lines += [
            f"{'most':16}{self.peak / GIB:10.3f}{reserved}",
            f"one layer alone: forward {self.layer_forward / self.u:.2f} u, backward {self.layer_backward / self.u:.2f} u and "
            f"{_gib(self.layer_weight_gradients)} of fp32 weight gradients",
            "",
            f"{'time':16}{'seconds':>10}{'share':>8}   last step{self._of_layers()}; collectives are local copies",
        ]
        rest = self.step_seconds - sum(self.part_seconds.values())
        for name, seconds in (self.part_seconds | {"other": rest, "step": self.step_seconds}).items():
            lines.append(f"{name:16}{seconds:10.3f}{seconds / self.step_seconds:8.1%}")
        if self.tokens_per_s_per_gpu is not None:
            without = ", without attention" if "stub" in self.attention else ""
            lines.append(f"{self.tokens_per_s_per_gpu:,.1f} tokens/s/GPU{without}")
        return "\n".join(lines)

    def _of_layers(self) -> str:
        computing = len(self.computing_layers)
        return "" if computing == self.layers else f" with {computing} of {self.layers} layers"

    def _computing_lines(self) -> list[str]:
        computing = len(self.computing_layers)
        if computing == self.layers:
            return []
        numbers = ", ".join(map(str, self.computing_layers))
        return [f"{'layers':10} {computing} of {self.layers} layers compute (number {numbers}); the others only take their memory"]


def rehearse(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, schedule: HeadSchedule, model: Llama,
    device: torch.device, dtype: torch.dtype, data: TrainingData,
    computing: list[int],
) -> RehearsalReport:  # fmt: skip
    """Runs --train-iters steps of rank --rehearse-rank. `model` is sharded and has no memory yet; the groups are fake.

    `computing`: numbers of the layers that compute (`computing_layers`).
    """
    settings = step_settings(args, config, layout, schedule, device, dtype, SharedRoom)  # host memory: before counting
    if args.rehearse_attention == "stub":
        stub = "stub" if args.attention_backend == "auto" else f"stub-{args.attention_backend}"
        settings = dataclasses.replace(settings, attention_backend=stub)
    with filled_collectives(), device_gauge(device) as gauge:
        seed_random_state(args.seed, 0, args.rehearse_rank)
        allocate_weights(model, device, args.seed, states_on_host=args.optimizer_cpu_offload)
        optimizer = build_optimizer(
            model, lr=args.lr, weight_decay=args.weight_decay, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps
        )
        _make_moments(optimizer)
        meter = PhaseMeter(model, gauge)
        pairs = _AttentionPairs()
        with (
            PartTimer(device, optimizer) as timer,
            wrapped([(step, "layer_context", pairs.counting)]),
            step_watchers(args, model, optimizer, device, console=True) as watchers,
            idle_layers(model, computing),
        ):
            run = TrainingRun(
                args, config, settings, model, optimizer, data.train, data.eod, device, dtype, meter=meter, watchers=watchers
            )
            limit = args.gpu_memory_limit_gib if device.type == "cpu" else None  # a GPU's allocator holds it itself
            journal = _Journal(timer, pairs, args.train_iters, profiled_steps(args), limit)
            run.train(journal)
    job = memory_job(args, config, layout, schedule, dtype)
    report = _report(args, job, computing, layout, settings, model, run, meter, journal)
    if args.rehearse_json:
        Path(args.rehearse_json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.rehearse_json).write_text(report.to_json(), encoding="utf-8")
    return report


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's moments, which training has from its second step on, are there in the first that is rehearsed."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class SharedRoom(ActivationStore):
    """A store whose layers of equal plans keep their activations in the same place outside the device."""

    def __init__(self, plans: list[LayerPlan], geometry: Geometry, device: torch.device, disk_directory: str | None = None):
        distinct = list(dict.fromkeys(plans))
        super().__init__(distinct, geometry, device, disk_directory)
        self.plans, self._forwards = plans, [0] * len(plans)
        self._places = [distinct.index(plan) for plan in plans]

    def region(self, layer: int, name: str):
        return super().region(self._places[layer], name)


class _AttentionPairs:
    """(query, key) pairs of this rank's micro-batches. The step's own count is a sum over ranks, of which there are none but this."""

    def __init__(self):
        self._pairs = 0

    def counting(self, layer_context):
        def counted(batch, *args):
            self._pairs += causal_pairs(batch.cu_seqlens)
            return layer_context(batch, *args)

        return counted

    def take(self) -> int:
        """Those since the last call."""
        taken, self._pairs = self._pairs, 0
        return taken


class _Journal:
    """What the training loop logs to: a line a step, the work of each, and the last one's figures.

    Raises OutOfMemoryError for a step that took more than `limit_gib`.
    """

    def __init__(self, timer: PartTimer, pairs: _AttentionPairs, train_iters: int, profiled: list[int], limit_gib: float | None):
        self._timer, self._pairs, self._train_iters, self._profiled = timer, pairs, train_iters, profiled
        self._limit_gib = limit_gib
        self.steps: list[dict] = []

    def log(self, record: StepRecord) -> None:
        self.record, self.part_seconds = record, self._timer.take()
        number, pairs, peak = record.step, self._pairs.take(), record.peak_memory_gib
        step = {"step": number, "seconds": record.step_time_s, "attention_pairs": pairs, "profiled": number in self._profiled}
        self.steps.append(step)
        print(f"step {number}/{self._train_iters} | {record.step_time_s:8.3f} s | peak {peak:8.3f} GiB", flush=True)
        if self._limit_gib is not None and peak > self._limit_gib:
            raise torch.OutOfMemoryError(
                f"Step {record.step} took {peak:.3f} GiB, counted on a CPU, more than --gpu-memory-limit-gib {self._limit_gib:g}."
            )


def _report(
    args: argparse.Namespace, job: Job, computing: list[int], layout: ParallelLayout, settings: StepSettings, model: Llama,
    run: TrainingRun, meter: PhaseMeter, journal: _Journal,
) -> RehearsalReport:  # fmt: skip
    geometry, plans, config, unit = settings.store.geometry, settings.store.plans, job.config, job.unit
    shards = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters())
    weight_gradients = 4 * config.layer_parameters()
    kept = max(sum(geometry.bytes_of(name) for name in KEPT if getattr(plan, name) == GPU) for plan in plans)
    phases = meter.last_step
    cuda = run.device.type == "cuda"
    return RehearsalReport(
        world_size=layout.world_size,
        rank=args.rehearse_rank,
        device=torch.cuda.get_device_name(run.device) if cuda else "cpu",
        dtype=str(job.dtype).removeprefix("torch."),
        attention=run.attention_backend,
        tokens_per_rank=geometry.tokens,
        layers=config.num_layers,
        computing_layers=computing,
        u=unit,
        states=meter.start_bytes,
        gradients=sum(4 * shard.numel() for shard in shards),
        host_states=host_state_bytes(config, layout.world_size) if args.optimizer_cpu_offload and cuda else 0,
        phases=phases,
        layer_weight_gradients=weight_gradients,
        layer_forward=phases["layer forward"].added + unit,
        layer_backward=phases["layer backward"].added + unit + kept - weight_gradients,
        reserved=torch.cuda.max_memory_reserved(run.device) if cuda else None,
        host=planned_bytes(plans, geometry, HOST),
        disk=planned_bytes(plans, geometry, DISK),
        step_seconds=journal.record.step_time_s,
        part_seconds=journal.part_seconds,
        tokens_per_s_per_gpu=journal.record.tokens_per_s_per_gpu if len(computing) == config.num_layers else None,
        copy_bytes_per_s=copy_speed(run.device) if cuda else None,
        settings=job_settings(
            job, plans, args.global_batch_size // (args.micro_batch_size * layout.data_parallel_size)
        ) | {"attention_pairs": journal.steps[-1]["attention_pairs"], "rehearsed_layers": len(computing)},
        steps=journal.steps,
    )


COPIED_BYTES, TIMED_COPIES = 2**26, 8


def copy_speed(device: torch.device) -> float:
    """Bytes a second between the GPU and pinned memory, each way while both run, after one copy to warm up."""
    copies, on_device = Copies(device), torch.empty(2, COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    for repetitions in (1, TIMED_COPIES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repetitions):
            copies.to_host(on_host[0], on_device[0])
            copies.to_device(on_device[1], on_host[1])
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return TIMED_COPIES * COPIED_BYTES / seconds


def _gib(bytes_: int) -> str:
    return f"{bytes_ / GIB:.3f} GiB"
