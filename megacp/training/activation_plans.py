"""From the flags to a plan for each layer's activations, and whether the plans are within the budgets.

    plans = activation_plans(args, config.num_layers)
    geometry = activation_geometry(args, config, layout, schedule, dtype)
    check_budgets(args, plans, geometry)      # ArgumentError: --host-memory-gib 4 is less than the 6.50 GiB …; 6.5 or … works

Budgets are those of one rank. Nothing is allocated here.
"""

import argparse
import math

import torch

from megacp.argument_checks import ArgumentError
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.memory.estimate import GIB
from megacp.memory.policy import DISK, HOST, PLANS, LayerPlan, plan_of
from megacp.memory.store import Geometry, planned_bytes
from megacp.model.config import ModelConfig
from megacp.parallel_state import ParallelLayout


def activation_plans(args: argparse.Namespace, num_layers: int) -> list[LayerPlan]:
    """One plan a layer, all alike."""
    return [plan_of(args.activation_memory, args.recompute_granularity)] * num_layers


def activation_geometry(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, schedule: HeadSchedule, dtype: torch.dtype
) -> Geometry:
    """Shapes of one rank's activations of a micro-batch."""
    tokens = args.seq_length * args.micro_batch_size // layout.context_parallel_size
    return Geometry.of(config, schedule, tokens, args.mlp_tile_size, dtype)


def check_budgets(args: argparse.Namespace, plans: list[LayerPlan], geometry: Geometry) -> None:
    """Raises ArgumentError when `plans` need more than --host-memory-gib or --disk-memory-gib; names the settings that do not."""
    for place, limit in _limits(args).items():
        needed = planned_bytes(plans, geometry, place)
        if limit is None or needed <= limit * GIB:
            continue
        enough = math.ceil(100 * needed / GIB) / 100
        fixes = [{f"{place}_memory_gib": enough}, *_smaller_settings(args, len(plans), geometry)]
        shown = [" ".join(f"--{name.replace('_', '-')} {value}" for name, value in fix.items()) for fix in fixes]
        raise ArgumentError(
            f"--{place}-memory-gib {limit:g} is less than the {enough:.2f} GiB that one rank's activations take on the {place} with "
            f"--activation-memory {args.activation_memory} --recompute-granularity {args.recompute_granularity}; "
            f"{' or '.join(shown)} works",
            tuple(fixes),
        )


def _limits(args: argparse.Namespace) -> dict[str, float | None]:
    return {HOST: args.host_memory_gib, DISK: args.disk_memory_gib}


def _smaller_settings(args: argparse.Namespace, num_layers: int, geometry: Geometry) -> list[dict[str, str]]:
    """Changes of one or both flags after which every budget is kept."""
    fixes = []
    for memory in PLANS:
        for granularity in ("selective", "full"):
            plans = [plan_of(memory, granularity)] * num_layers
            if memory == "disk" and not args.disk_offload_dir:
                continue
            if all(limit is None or planned_bytes(plans, geometry, place) <= limit * GIB for place, limit in _limits(args).items()):
                wanted = {"activation_memory": memory, "recompute_granularity": granularity}
                fixes.append({name: value for name, value in wanted.items() if value != getattr(args, name)})
    return fixes
