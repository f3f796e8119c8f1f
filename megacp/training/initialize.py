"""From the launcher's environment to a device and process groups.

    device = select_device("auto")                          # cuda:LOCAL_RANK under torchrun on a GPU node, else cpu
    initialize_distributed(layout, device, timeout)         # default group, parallel_state's groups

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without them the job is one rank and needs no launcher:
`python pretrain_llama.py …` works.
"""

import argparse
import math
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from megacp.memory.units import GIB
from megacp.parallel_state import ParallelLayout, destroy_model_parallel, initialize_model_parallel

TASKS_OF_OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # set in a process started by srun, mpirun
CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # of fixed size; without one, streams share workspaces as they come
MINIMUM_SECONDS, MAXIMUM_SECONDS = 600.0, 86400.0  # of a collective's time limit


def launched_world_size() -> int:
    """Ranks of the job, from WORLD_SIZE; 1 without a launcher."""
    return _whole_number("WORLD_SIZE", 1)


def launched_rank() -> int:
    """This process's rank, from RANK; 0 without a launcher."""
    return _whole_number("RANK", 0)


def check_launch(alone: bool) -> None:
    """Refuses an environment in which ranks would wait for ones that never come, or not know of each other. ValueError.

    `alone`: one process is meant to stand for a rank of a job of any size, as in a dry run.
    """
    rank, ranks = launched_rank(), launched_world_size()
    if ranks < 1 or not 0 <= rank < max(ranks, 1):
        raise ValueError(f"RANK={rank} with WORLD_SIZE={ranks} in the environment: ranks count from 0 to WORLD_SIZE - 1; torchrun sets both")
    if alone:
        return
    if "RANK" in os.environ:
        if "WORLD_SIZE" not in os.environ:
            raise ValueError(f"RANK={rank} is in the environment, but WORLD_SIZE is not; torchrun sets both")
    else:
        for variable in ("WORLD_SIZE", *TASKS_OF_OTHER_LAUNCHERS):
            count = _whole_number(variable, 1)
            if count > 1:
                raise ValueError(
                    f"{variable}={count} in the environment, but no RANK: each process would train alone as rank 0 of 1. "
                    f"torchrun --nproc-per-node {count} works (one torchrun a node); for one rank on purpose: {variable}=1"
                )


def job_of(args: argparse.Namespace) -> tuple[int, int]:
    """Ranks of the job and this process's rank: the launcher's, or those rehearsed. Raises ValueError for both at once."""
    if not args.rehearse_world_size:
        return launched_world_size(), launched_rank()
    if launched_world_size() != 1:
        raise ValueError(
            f"--rehearse-world-size {args.rehearse_world_size} takes one process, and the launcher started {launched_world_size()}; "
            "python pretrain_llama.py instead of torchrun works"
        )
    return args.rehearse_world_size, args.rehearse_rank


def select_device(requested: str) -> torch.device:
    """`auto` takes the GPU of LOCAL_RANK when there is one. Raises ValueError naming --device when it asks for what is not there."""
    # Segments that grow in place do not fragment when steps differ in their documents. Read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    local_rank = _whole_number("LOCAL_RANK", 0)
    available = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError("--device cuda: torch finds no GPU here; --device cpu works")
    if local_rank >= available:
        raise ValueError(
            f"--device {requested}: local rank {local_rank} has no GPU, this node has {available}; "
            f"torchrun --nproc-per-node {available} gives each rank one"
        )
    return torch.device("cuda", local_rank)


def limit_gpu_memory(gib: float | None, device: torch.device) -> None:
    """Lets PyTorch take no more than `gib` of a GPU; what CUDA and NCCL take themselves is not counted. None, or a CPU: no limit.

    Raises ValueError naming --gpu-memory-limit-gib when it is more than the GPU has.
    """
    if gib is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * GIB > total:
        raise ValueError(f"--gpu-memory-limit-gib {gib:g} is more than the GPU's {total / GIB:.2f} GiB; less works, or to leave it out")
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device)


def limit_notes(gib: float | None, device: torch.device) -> list[str]:
    """A line for the person who limits the GPU memory of training on a CPU. (A rehearsal there counts.)"""
    if gib is None or device.type != "cpu":
        return []
    return [f"--gpu-memory-limit-gib {gib:g} holds for GPUs and rehearsals; this run is on a CPU, where a step may take more"]


def use_deterministic_kernels() -> None:
    """Makes torch's kernels give the same bits for the same inputs, or raise; call it before the first product on a GPU.

    Attention is told by `AttentionSettings.deterministic`; the project's own kernels are so always. Raises ValueError naming
    CUBLAS_WORKSPACE_CONFIG when it forbids that.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise ValueError(
            f"--deterministic: with CUBLAS_WORKSPACE_CONFIG={workspace} in the environment cuBLAS is not deterministic; "
            f"{' or '.join(CUBLAS_WORKSPACES)} works, and so does leaving it out"
        )
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new tensor; all of ours are written first
    torch.use_deterministic_algorithms(True)


def initialize_distributed(layout: ParallelLayout, device: torch.device, timeout: timedelta, fake_rank: int | None = None) -> None:
    """Makes the default group (NCCL on GPUs, gloo on CPUs) and the groups of `layout`; `timeout` is that of every collective.

    `fake_rank` stands in for that rank of a job of any size, in one process: groups have their true sizes, and no bytes move.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if fake_rank is not None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=fake_rank, world_size=layout.world_size)
    else:
        if "RANK" not in os.environ:
            one_rank = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
            os.environ.update(one_rank)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        except ValueError as error:
            if "environment variable" not in str(error):
                raise
            raise ValueError(f"{error}; torchrun sets it, and for ranks started by hand MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 works") from None
    initialize_model_parallel(layout, device.type, timeout)


def shut_down_distributed() -> None:
    """Ends the groups, if there are any."""
    if dist.is_initialized():
        destroy_model_parallel()
        dist.destroy_process_group()


def launcher_notes(step_seconds: float) -> list[str]:
    """A line for the person when torchrun would kill the ranks in the step that a SIGTERM or Ctrl-C lets them finish and save."""
    reads = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)  # older ones wait 30 s whatever it says
    patience = _whole_number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30) if reads else 30
    if "TORCHELASTIC_RUN_ID" not in os.environ or step_seconds < patience:
        return []
    return [
        f"a step may take {step_seconds:.0f} s, but torchrun kills the ranks {patience} s after SIGTERM or Ctrl-C, before they have saved; "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(3 * step_seconds / 60) * 60} in its environment leaves them time"
        f"{'' if reads else f', from torch 2.12 on; this is {torch.__version__}'}"
    ]


def _whole_number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip() or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text} in the environment is not a whole number; torchrun sets it") from None


def collective_timeout(minutes: float, step_seconds: float) -> timedelta:
    """`minutes` when given; else five predicted steps, ten minutes to a day: a rank may wait a step for a slower one."""
    return timedelta(minutes=minutes) if minutes else timedelta(seconds=min(max(5 * step_seconds, MINIMUM_SECONDS), MAXIMUM_SECONDS))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
