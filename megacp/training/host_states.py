"""Host memory: is there room for activations and states (--optimizer-cpu-offload), and how many cores update the states.

    check_activations(job, plans, "host", available_host_bytes())   # ValueError before anything is taken, as below
    prepare_host(job, plans, available_host_bytes())      # ValueError before anything is taken; sets torch's threads
    update_threads()                                      # 16: of a host's 128 cores, shared by 8 ranks

Memory that Linux has promised and cannot give ends a process without a word, hence the look beforehand.
"""

import math
import os
import re
from pathlib import Path

import torch

from megacp.memory.policy import HOST, LayerPlan
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.planner import STATE_BYTES, Job
from megacp.planning.host_states import host_state_bytes
from megacp.training.initialize import launched_world_size

# Processes that another launcher than torchrun started, mpirun and srun: on this host ("8(x2),4" for three hosts) and on all.
TASKS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"))
MOST_RANKS = 4096
# Limit and use of a group of processes, of cgroups version 2 and 1; files kept in memory make room when asked.
CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def check_activations(job: Job, plans: list[LayerPlan], activation_memory: str, available: int | None) -> None:
    """Raises ValueError naming --activation-memory when this host has no room for the activations of its ranks.

    `plans`: of the layers that have room of their own. `available`: bytes; None when nobody knows.
    """
    ranks_here, activations = _local_ranks(), planned_bytes(plans, job.geometry, HOST)
    if available is None or ranks_here * activations <= available:
        return
    share = int(100 * available / ranks_here / GIB) / 100
    raise ValueError(
        f"--activation-memory {activation_memory}: {ranks_here} {'rank' if ranks_here == 1 else 'ranks'} on this host take "
        f"{activations / GIB:.2f} GiB of host memory each for activations, and {available / GIB:.2f} GiB are there for all; "
        f"--activation-memory auto with --host-memory-gib {share:g}, --activation-memory disk with --disk-offload-dir, "
        "--recompute-granularity full or more ranks in --context-parallel-size take less"
    )


def prepare_host(job: Job, plans: list[LayerPlan], available: int | None) -> None:
    """Raises ValueError naming --optimizer-cpu-offload when this host has no room for its ranks; lets updates use its cores.

    `plans`: of the layers that have room of their own. `available`: bytes; None when nobody knows.
    """
    ranks_here = _local_ranks()
    activations = planned_bytes(plans, job.geometry, HOST)
    if available is not None and ranks_here * (job.host_state_bytes + activations) > available:
        raise ValueError(_too_small(job, activations, ranks_here, available))
    torch.set_num_threads(update_threads())


def _too_small(job: Job, activations: int, ranks_here: int, available: int) -> str:
    on_device = STATE_BYTES * job.config.parameter_count() // job.sharding_ranks
    fix = "a smaller --host-memory-gib or --activation-memory disk leaves more for them"
    for ranks in range(2 * job.sharding_ranks, MOST_RANKS + 1, job.sharding_ranks):
        if ranks_here * (host_state_bytes(job.config, ranks) + activations) <= available:
            fix = f"{ranks} ranks in all, {ranks_here} a host, share them enough"
            break
    return (
        f"--optimizer-cpu-offload: {ranks_here} {'rank' if ranks_here == 1 else 'ranks'} on this host take "
        f"{job.host_state_bytes / GIB:.2f} GiB of host memory each for states and {activations / GIB:.2f} for activations, and "
        f"{available / GIB:.2f} GiB are there for all; {fix}; without the flag states take {on_device / GIB:.2f} GiB of each GPU"
    )


def update_threads() -> int:
    """Threads of this rank's update: its share of the cores, or OMP_NUM_THREADS where that is more than 1.

    torchrun sets it to 1 when nobody else has, so that one says nothing.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "1")
    if wanted.isdecimal() and int(wanted) > 1:
        return int(wanted)
    return max(1, len(os.sched_getaffinity(0)) // _local_ranks())


def _local_ranks() -> int:
    """Ranks that share this host: as torchrun says, or this host's share by another launcher's word, or one for each GPU here.

    A script that starts ranks itself may set LOCAL_WORLD_SIZE.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = launched_world_size()
    for here, everywhere in TASKS:
        if here in os.environ and everywhere in os.environ:
            tasks = max(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ[here]))
            return math.ceil(ranks * tasks / int(os.environ[everywhere]))  # a task may have started several ranks
    return max(1, min(ranks, torch.cuda.device_count()))


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """What this host's processes may still take, or those of its container where that is less. None where Linux does not say."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    rooms = [int(fields["MemAvailable"].split()[0]) * 1024]
    groups = root / "proc/self/cgroup"  # a kernel may be built without
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        for controller, files in CGROUP_FILES.items():
            if controller in controllers.split(","):
                mount = root / "sys/fs/cgroup" / controller
                own = mount / group.lstrip("/")
                rooms += [room for place in (own, *own.parents) if place.is_relative_to(mount) for room in _room(place, *files)]
    return min(rooms)


def _room(group: Path, limit_file: str, use_file: str, reclaimable: str) -> list[int]:
    """Bytes left in a group of processes; none said where it has no limit."""
    if not (group / limit_file).exists() or (limit := (group / limit_file).read_text().strip()) == "max":
        return []
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return [int(limit) - int((group / use_file).read_text()) + int(statistics[reclaimable])]
