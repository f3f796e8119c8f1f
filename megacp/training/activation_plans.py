"""From the flags to a plan for each layer's activations, and whether the plans are within the budgets.

    job = memory_job(args, config, layout, schedule, dtype)
    plans = activation_plans(args, job, device)
    check_budgets(args, plans, job)  # ArgumentError: --host-memory-gib 4 is less than the 6.50 GiB …; 6.5 or … works

Budgets are those of one rank. Nothing is allocated here.
"""

import argparse
import math
from dataclasses import replace

import torch

from megacp.argument_checks import ArgumentError
from megacp.context_parallel.head_schedule import HeadSchedule, build_head_schedule
from megacp.memory.policy import DISK, HOST, PLANS, LayerPlan, plan_of
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.parallel_state import ParallelLayout
from megacp.planner import DeviceTooSmall, Job, choose_plans, predict

# FLOPs of a stage's projection of one tile, some 40 µs of an H200, below which launching a stage's many small kernels may take longer
# than they do: on two H200s steps of llama3.2-1b took 1.1 to 1.8 times as long in four stages as at once with 17e9, in tiles of 8,192,
# and 1.04 times with 34e9, in 16,384.
SMALL_PROJECTION = 30e9
GPU_SHARE = 0.9  # the rest: CUDA's context, NCCL's buffers, the allocator's margin


def memory_job(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, schedule: HeadSchedule, dtype: torch.dtype
) -> Job:
    """What one rank's memory depends on, from the flags."""
    tokens = args.seq_length * args.micro_batch_size // layout.context_parallel_size
    return Job(
        config, schedule, tokens, layout.world_size, args.mlp_tile_size, args.loss_tile_size, dtype, args.upipe_query_chunk,
        accumulates=args.global_batch_size > args.micro_batch_size * layout.data_parallel_size,
        states_on_host=args.optimizer_cpu_offload, sequences=args.micro_batch_size,
    )  # fmt: skip


def activation_plans(args: argparse.Namespace, job: Job, device: torch.device) -> list[LayerPlan]:
    """One plan a layer: all alike, or with --activation-memory auto the fastest that the budgets allow.

    A function of the flags and the GPU's size, so that all ranks choose alike. Raises ArgumentError when none fits.
    """
    full = args.recompute_granularity == "full"
    if args.activation_memory != "auto":
        return [plan_of(args.activation_memory, args.recompute_granularity, args.upipe_prefetch)] * job.config.num_layers
    limit, near = device_limit(args, device), [plan_of("gpu", args.recompute_granularity, args.upipe_prefetch)] * job.config.num_layers
    if limit is None:
        return near
    if args.recompute_granularity == "none":
        needed = predict(job, near).device_bytes
        if needed > limit:
            raise ArgumentError(
                f"--recompute-granularity none keeps all on the GPU, {needed / GIB:.2f} GiB on a rank, and {limit / GIB:.2f} GiB are there; "
                "selective works with less"
            )
        return near
    host, disk = (None if gib is None else int(gib * GIB) for gib in (args.host_memory_gib, args.disk_memory_gib))
    try:
        return choose_plans(job, limit, host, disk if args.disk_offload_dir else 0, full, args.upipe_prefetch)
    except ValueError as error:
        more = _more_device(args, job) if isinstance(error, DeviceTooSmall) else _more_elsewhere(args)
        raise ArgumentError(f"--activation-memory auto finds no plan: {error}; {more}") from None


def stages_note(args: argparse.Namespace, job: Job, plans: list[LayerPlan], device: torch.device) -> str | None:
    """Where stages make kernels small, and their saving of memory is not needed."""
    schedule, limit = job.schedule, device_limit(args, device)
    width = schedule.heads_per_stage * job.config.kv_channels
    if len(schedule.stages) == 1 or limit is None or 2 * job.tile_size * job.config.hidden_size * width > SMALL_PROJECTION:
        return None
    heads = schedule.num_heads
    whole = build_head_schedule(heads, schedule.num_kv_heads, schedule.ulysses_degree, heads)
    needed = predict(replace(job, schedule=whole), plans).device_bytes
    if needed > limit:
        return None
    return (
        f"stages of {schedule.heads_per_stage} heads of {job.config.kv_channels} are small kernels, which the host may not launch fast "
        f"enough; all heads at once, --cp-comm-type a2a, take {needed / GIB:.2f} GiB of GPU memory and fit"
    )


def _more_device(args: argparse.Namespace, job: Job) -> str:
    """What a step takes less of the device with; chunks and tiles of more than a rank's tokens would change nothing."""
    given = [name for name in ("gpu_memory_gib", "gpu_memory_limit_gib") if getattr(args, name) is not None]
    larger = [f"a larger --{given[0].replace('_', '-')} than {getattr(args, given[0]):g}"] if given else ["a larger GPU"]
    tile = args.mlp_tile_size
    chunked = args.upipe_query_chunk is not None and args.upipe_query_chunk <= tile
    smaller = "a smaller --mlp-tile-size" if chunked or job.tokens <= tile else f"--upipe-query-chunk {tile}"
    stages = job.schedule
    fewer = [] if stages.heads_per_stage == stages.ulysses_degree else [f"--upipe-heads-per-stage {stages.ulysses_degree}"]
    return " or ".join([*larger, *fewer, smaller, "more ranks in --context-parallel-size"]) + " gives more or takes less"


def _more_elsewhere(args: argparse.Namespace) -> str:
    """What gives more room on host or disk, or takes less of it."""
    disk = "a larger --disk-memory-gib" if args.disk_offload_dir else "--disk-offload-dir DIR"
    less = [] if args.recompute_granularity == "full" else ["--recompute-granularity full"]
    ways = ["a larger --host-memory-gib", disk, *less, "more ranks in --context-parallel-size"]
    return " or ".join(ways) + " gives more or takes less"


def device_limit(args: argparse.Namespace, device: torch.device) -> int | None:
    """Bytes that a rank may plan with: --gpu-memory-gib, or nine tenths of --gpu-memory-limit-gib, or of what the GPU has.

    None on a CPU without the flags.
    """
    if args.gpu_memory_gib is not None:
        return int(args.gpu_memory_gib * GIB)
    if args.gpu_memory_limit_gib is not None:
        return int(GPU_SHARE * args.gpu_memory_limit_gib * GIB)
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def check_budgets(args: argparse.Namespace, plans: list[LayerPlan], job: Job) -> None:
    """Raises ArgumentError when `plans` need more than --host-memory-gib or --disk-memory-gib; names the settings that do not."""
    for place, limit in _limits(args).items():
        needed = _needed(job, plans, place)
        if limit is None or needed <= limit * GIB:
            continue
        enough = math.ceil(100 * needed / GIB) / 100
        fixes = [{f"{place}_memory_gib": enough}, *_smaller_settings(args, job)]
        shown = [" ".join(f"--{name.replace('_', '-')} {value}" for name, value in fix.items()) for fix in fixes]
        whose, states = "activations", ""
        if place == HOST and job.states_on_host:
            whose, states = "activations and states", f" --optimizer-cpu-offload ({job.host_state_bytes / GIB:.2f} GiB of states)"
        raise ArgumentError(
            f"--{place}-memory-gib {limit:g} is less than the {enough:.2f} GiB that one rank's {whose} take on the {place} with "
            f"--activation-memory {args.activation_memory} --recompute-granularity {args.recompute_granularity}{states}; "
            f"{' or '.join(shown)} works",
            tuple(fixes),
        )


def _limits(args: argparse.Namespace) -> dict[str, float | None]:
    return {HOST: args.host_memory_gib, DISK: args.disk_memory_gib}


def _needed(job: Job, plans: list[LayerPlan], place: str) -> int:
    return job.host_bytes(plans) if place == HOST else planned_bytes(plans, job.geometry, place)


def _smaller_settings(args: argparse.Namespace, job: Job) -> list[dict[str, str]]:
    """Changes of one or both flags after which every budget is kept."""
    fixes = []
    for memory in PLANS:
        for granularity in ("selective", "full"):
            plans = [plan_of(memory, granularity)] * job.config.num_layers
            if memory == "disk" and not args.disk_offload_dir:
                continue
            if all(limit is None or _needed(job, plans, place) <= limit * GIB for place, limit in _limits(args).items()):
                wanted = {"activation_memory": memory, "recompute_granularity": granularity}
                fixes.append({name: value for name, value in wanted.items() if value != getattr(args, name)})
    return fixes
