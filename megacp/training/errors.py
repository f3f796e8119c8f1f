"""Turns an error that the user can mend into one readable line and an exit code; others keep their traceback.

    with explain_errors(is_first_rank) as outcome:
        validate_args(args, world_size)         # raises ArgumentError
    sys.exit(outcome.exit_code)                 # 2, after "error: --seq-length 1001 …" on standard error

Before the process groups exist every rank finds the same error, and only the first prints it. Later an error may be one
rank's own (its disk, its file): then that rank prints it with its number and leaves at once, without waiting in a collective for
the others, which learn of it by `peer_watch` and end too.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megacp.checkpointing.distributed import CheckpointError
from megacp.data.indexed_dataset import DatasetError
from megacp.memory.disk_file import DiskError
from megacp.training.resilience import CollectiveTimeout, NonFiniteError

USAGE_ERROR = 2  # flags or files that cannot work
RUN_ERROR = 1  # the run broke
SECONDS_TO_SPEAK = 3.0  # the launcher ends all ranks when the first one ends: let the one that prints be it


@dataclass
class Outcome:
    exit_code: int = 0


@contextmanager
def explain_errors(is_first_rank: bool) -> Iterator[Outcome]:
    """Sets `outcome.exit_code` when the block raises an error of ours. Once groups exist the process ends here instead."""
    outcome = Outcome()
    try:
        yield outcome
    except (
        ValueError, ImportError, OSError, CheckpointError, DiskError, NonFiniteError, CollectiveTimeout, torch.OutOfMemoryError
    ) as error:  # fmt: skip
        usage = isinstance(error, (DatasetError, ValueError, ImportError))
        outcome.exit_code = USAGE_ERROR if usage else RUN_ERROR
        running = dist.is_initialized()
        if is_first_rank or running:
            where = f"[rank {dist.get_rank()}] " if running and dist.get_world_size() > 1 else ""
            print(f"{where}error: {_explain(error)}", file=sys.stderr, flush=True)
        if running:
            sys.stdout.flush()
            os._exit(outcome.exit_code)
        if not is_first_rank:
            time.sleep(SECONDS_TO_SPEAK)


def _explain(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of GPU memory: {str(error).splitlines()[0]} More ranks in --context-parallel-size, a smaller "
            "--upipe-heads-per-stage, --mlp-tile-size or --loss-tile-size, or a shorter --seq-length take less"
        )
    return str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
