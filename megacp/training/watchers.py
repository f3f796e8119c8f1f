"""What watches a run's steps, as its flags ask: a profiler, a monitor of progress.

    with step_watchers(args, model, optimizer, device, console=is_first_rank) as watchers:
        TrainingRun(..., watchers=watchers).train(logger)
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megacp.model.llama import Llama
from megacp.training.loop import StepWatcher
from megacp.training.path_checks import check_folder
from megacp.training.profiling import StepProfiler
from megacp.training.progress_monitor import ProgressMonitor, marks_of


@contextmanager
def step_watchers(
    args: argparse.Namespace, model: Llama, optimizer: torch.optim.Optimizer, device: torch.device, console: bool
) -> Iterator[list[StepWatcher]]:
    """`console`: this process tells of progress on standard output. At the end of the block, however it ends, all is put away."""
    rank = dist.get_rank()
    watchers = []
    with ExitStack() as stack:
        heartbeat = heartbeat_path(args.heartbeat_file, rank, console)
        interval = args.progress_interval if console else 0.0
        if interval or heartbeat:
            monitor = ProgressMonitor(
                model, train_iters=args.train_iters, tokens=args.global_batch_size * args.seq_length,
                recompute=args.recompute_granularity == "full", marks=marks_of(device), interval=interval, heartbeat=heartbeat,
                rank=rank, device=device,
            )  # fmt: skip
            watchers.append(stack.enter_context(monitor))
        if args.profile and rank in args.profile_ranks:
            flag, directory = ("--profile-dir", args.profile_dir) if args.profile_dir else ("--tensorboard-dir", args.tensorboard_dir)
            check_folder(flag, Path(directory))  # this rank's host may have other disks than the first one's
            first, stop = args.profile_step_start, args.profile_step_end
            watchers.append(stack.enter_context(StepProfiler(first, stop, directory, rank, model, optimizer, device)))
        yield watchers


def heartbeat_path(pattern: str | None, rank: int, first: bool) -> str | None:
    """Where a rank's heartbeat goes; None: nowhere.

    >>> heartbeat_path("beat.json", 3, first=False), heartbeat_path("beat-{rank}.json", 3, first=False)
    (None, 'beat-3.json')
    """
    if pattern is None or not (first or "{rank}" in pattern):
        return None
    return pattern.replace("{rank}", str(rank))
