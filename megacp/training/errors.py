"""Turns an error that the user can mend into one readable line and an exit code; others keep their traceback.

    with explain_errors(is_first_rank) as outcome:
        validate_args(args, world_size)         # raises ArgumentError
    sys.exit(outcome.exit_code)                 # 2, after "error: --seq-length 1001 …" on standard error

Before the process groups exist every rank mostly finds the same error: the first prints it, and the launcher then ends the others.
One that still lives a moment later had an error of its own (data or a GPU that its node lacks), and prints that with its number.
Once groups exist, a rank prints its error with its number and leaves at once, without waiting in a collective for the others, which
learn of it by `peer_watch` and end too.

What the project raises is written for the user. A ValueError out of Python's or a library's own code, such as "too many values to
unpack", is a fault of the program: it is told with its traceback.
"""

import dis
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from megacp.checkpointing.distributed import CheckpointError
from megacp.memory.disk_file import DiskError
from megacp.training.resilience import CollectiveTimeout, NonFiniteError

USAGE_ERROR = 2  # flags or files that cannot work
RUN_ERROR = 1  # the run broke
SECONDS_TO_SPEAK = 3.0  # the launcher ends all ranks when the first one ends: let the one that prints be it
PROJECT = ("megacp", "pretrain_llama", "__main__")  # modules, with those inside


@dataclass
class Outcome:
    exit_code: int = 0


@contextmanager
def explain_errors(is_first_rank: bool) -> Iterator[Outcome]:
    """Sets `outcome.exit_code` when the block raises one of the errors below. Once groups exist the process ends here instead."""
    outcome = Outcome()
    try:
        yield outcome
    except (
        ValueError, ImportError, OSError, CheckpointError, DiskError, NonFiniteError, CollectiveTimeout, torch.OutOfMemoryError
    ) as error:  # fmt: skip
        for_the_user = is_for_the_user(error)
        outcome.exit_code = USAGE_ERROR if for_the_user and isinstance(error, (ValueError, ImportError)) else RUN_ERROR
        running = dist.is_initialized()
        if not is_first_rank and not running:
            time.sleep(SECONDS_TO_SPEAK)
        if running:
            where = f"[rank {dist.get_rank()}] " if dist.get_world_size() > 1 else ""
        else:
            where = "" if is_first_rank else f"[rank {os.environ['RANK']}] "
        details = "" if for_the_user else "".join(traceback.format_exception(error))
        print(f"{details}{where}error: {_explain(error)}", file=sys.stderr, flush=True)
        if running:
            sys.stdout.flush()
            os._exit(outcome.exit_code)


def is_for_the_user(error: BaseException) -> bool:
    """Whether the text says all: of a kind of ours, raised by a `raise` of ours, or naming a file, or a package that is missing."""
    if isinstance(error, (torch.OutOfMemoryError, ModuleNotFoundError)) or _is_ours(type(error).__module__):
        return True
    if isinstance(error, OSError) and error.filename is not None:
        return True
    return _raised_by_us(error.__traceback__)


def _raised_by_us(trace: TracebackType | None) -> bool:
    """Whether the error began in a `raise` of the project's code, not in what some other line of it called or did."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, began = trace.tb_frame.f_code.co_code, trace.tb_lasti
    return _is_ours(trace.tb_frame.f_globals.get("__name__", "")) and code[began] == dis.opmap["RAISE_VARARGS"]


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PROJECT


def _explain(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of GPU memory: {str(error).splitlines()[0]} More ranks in --context-parallel-size, a smaller "
            "--upipe-heads-per-stage, --mlp-tile-size or --loss-tile-size, or a shorter --seq-length take less"
        )
    plain = isinstance(error, (ValueError, RuntimeError)) and is_for_the_user(error)
    return str(error) if plain else f"{type(error).__name__}: {error}"
