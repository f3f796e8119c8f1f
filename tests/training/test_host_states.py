"""States in host memory: refused where there is no room, updated by all cores, saved and loaded as any."""

import itertools
import os
import re

import pytest
import torch

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import HOST, PLANS, LayerPlan
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.model.config import preset
from megacp.planner import Job
from megacp.planning.host_states import host_state_bytes, power_of_two
from megacp.training import host_states
from megacp.training.host_states import available_host_bytes, check_activations, prepare_host, update_threads
from megacp.training.sharding import allocate_weights
from tests.test_pretrain import MODEL, numbers, run, train

TINY = preset("llama-tiny")
JOB = Job(TINY, build_head_schedule(8, 4, 2, 2), 512, 2, 256, 256, torch.float32, states_on_host=True)
OFFLOAD = "--optimizer-cpu-offload"


def test_a_run_goes_on_with_and_without_from_the_others_checkpoint(tmp_path):
    """On a CPU the arithmetic is the same, so every number is, bit by bit."""
    flags = [*MODEL, "--mock-data", "--lr-decay-iters", 6, "--context-parallel-size", 2]
    train([*flags, "--train-iters", 6, "--log-jsonl", tmp_path / "straight"], ranks=2)
    saved = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--log-jsonl", tmp_path / "log"]
    for steps, own in ((3, [OFFLOAD]), (4, []), (6, [OFFLOAD])):
        train([*flags, *saved, "--train-iters", steps, *own], ranks=2)
    assert numbers(tmp_path / "log") == numbers(tmp_path / "straight")


class FullHost:
    def to_empty(self, device):
        raise RuntimeError(f"no memory on the {device}\nand a trace")


def test_a_host_that_gives_no_memory_is_named_with_the_flag():
    with pytest.raises(ValueError, match=r"--optimizer-cpu-offload: the host refused .*\(no memory on the cpu\); more ranks"):
        allocate_weights(FullHost(), torch.device("cuda"), 0, states_on_host=True)
    with pytest.raises(RuntimeError, match="no memory on the cuda"):  # a GPU that is full is told by its own error
        allocate_weights(FullHost(), torch.device("cuda"), 0)


@pytest.fixture
def two_ranks_here(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


def test_room_is_looked_for_before_anything_is_taken(two_ranks_here):
    plans = [PLANS["host"]] * TINY.num_layers
    needed = 2 * JOB.host_bytes(plans)
    prepare_host(JOB, plans, needed)
    prepare_host(JOB, plans, None)
    with pytest.raises(ValueError) as error:
        prepare_host(JOB, plans, needed - 1)
    assert str(error.value).startswith("--optimizer-cpu-offload: 2 ranks on this host take 0.03 GiB of host memory each for states and 0.00")
    # The advice is true, and no smaller number of ranks would do.
    (ranks,) = re.findall(r"(\d+) ranks in all", str(error.value))
    assert int(ranks) == 4 and 2 * host_state_bytes(TINY, 4) < 2 * JOB.host_state_bytes - 1
    # 12 bytes of 4.2 million parameters on 2 ranks.
    assert "without the flag states take 0.02 GiB of each GPU" in str(error.value)


def test_activations_that_the_host_has_no_room_for_are_refused_before_the_system_ends_the_run(two_ranks_here):
    plans = [PLANS["host"]] * TINY.num_layers
    activations = planned_bytes(plans, JOB.geometry, HOST)
    check_activations(JOB, plans, "host", 2 * activations)
    check_activations(JOB, plans, "host", None)
    check_activations(JOB, [LayerPlan()] * TINY.num_layers, "gpu", 0)
    with pytest.raises(ValueError, match="^--activation-memory host: 2 ranks on this host take 0.00 GiB .* take less$") as error:
        check_activations(JOB, plans, "host", 2 * activations - 1)
    budget = float(re.search(r"auto with --host-memory-gib ([0-9.]+)", str(error.value))[1])
    assert budget * GIB <= activations, "what is advised fits"


def test_a_run_of_forty_tebibytes_of_activations_says_so():
    tile = 2**20
    job = f"--model llama-tiny --num-layers 20000 --seq-length {tile} --mlp-tile-size {tile} --loss-tile-size {tile} --mock-data"
    done = run([*job.split(), "--activation-memory", "host"])
    assert done.returncode == 2 and "--activation-memory host: 1 rank on this host take 40625.00 GiB" in done.stderr, done.stderr


def test_no_number_of_ranks_is_named_where_activations_alone_are_too_many(two_ranks_here):
    with pytest.raises(ValueError) as error:
        prepare_host(JOB, [PLANS["host"]] * TINY.num_layers, 1000)
    assert "in all" not in str(error.value) and "a smaller --host-memory-gib or --activation-memory disk" in str(error.value)
    with pytest.raises(ValueError, match="states and 0.00 for activations"):
        prepare_host(JOB, [LayerPlan()], 1000)


def test_an_update_takes_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(128)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for variable, expected in ((None, 16), ("1", 16), ("4", 4)):  # torchrun says 1 when nobody has said anything
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert update_threads() == expected
        prepare_host(JOB, [], None)
    assert threads == [16, 16, 4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "200")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert update_threads() == 1


LAUNCHERS = {
    "torchrun": (dict(WORLD_SIZE="16", LOCAL_WORLD_SIZE="4", SLURM_STEP_TASKS_PER_NODE="1(x4)", SLURM_STEP_NUM_TASKS="4"), 8, 4),
    "none": ({}, 8, 1),
    "a script of one's own": (dict(WORLD_SIZE="16"), 8, 8),
    "one, on a part of the GPUs": (dict(WORLD_SIZE="2"), 8, 2),
    "on CPUs": (dict(WORLD_SIZE="2"), 0, 1),
    "srun, a GPU visible to each task": (dict(WORLD_SIZE="16", SLURM_STEP_TASKS_PER_NODE="8(x2)", SLURM_STEP_NUM_TASKS="16"), 1, 8),
    "srun, a rank on each of two hosts": (dict(WORLD_SIZE="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_STEP_NUM_TASKS="2"), 8, 1),
    "srun of a script for each host": (dict(WORLD_SIZE="16", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_STEP_NUM_TASKS="2"), 8, 8),
    "srun, uneven": (dict(WORLD_SIZE="20", SLURM_STEP_TASKS_PER_NODE="4,8(x12)", SLURM_STEP_NUM_TASKS="100"), 1, 2),
    "mpirun": (dict(WORLD_SIZE="12", OMPI_COMM_WORLD_LOCAL_SIZE="6", OMPI_COMM_WORLD_SIZE="12"), 8, 6),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_share_the_host_are_known_whoever_starts_them(launcher, monkeypatch):
    environment, gpus, expected = LAUNCHERS[launcher]
    for variable in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", *itertools.chain(*host_states.TASKS)):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    plans = [PLANS["host"]] * TINY.num_layers
    enough = expected * planned_bytes(plans, JOB.geometry, HOST)
    check_activations(JOB, plans, "host", enough)
    with pytest.raises(ValueError, match=f"--activation-memory host: {expected} rank"):
        check_activations(JOB, plans, "host", enough - 1)


def linux(root, groups, files):
    files = {"proc/meminfo": "MemTotal:  100 kB\nMemAvailable:   64 kB\nHugePages_Total:   0\n", "proc/self/cgroup": groups} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder, limit, use, version=2):
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 2: ("max", "current", "inactive_file")}
    most, now, reclaimable = names[version]
    return {
        f"{folder}/memory.{most}": f"{limit}\n", f"{folder}/memory.{now}": f"{use}\n",
        f"{folder}/memory.stat": f"anon 7\n{reclaimable} 1024\n",
    }  # fmt: skip


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        ("0::/\n", {}, 64 * 1024),
        ("0::/\n", group(V2, 40 * 1024, 11 * 1024), 30 * 1024),  # files in memory are as good as free
        ("0::/job/step\n", group(f"{V2}/job/step", "max", 0) | group(f"{V2}/job", 9 * 1024, 2048), 8 * 1024),  # a limit further up
        ("0::/job\n", group(f"{V2}/job", 99999999, 0), 64 * 1024),
        ("5:cpu,memory:/job\n0::/\n", group(f"{V1}/job", 20 * 1024, 5 * 1024, 1) | group(V1, 2**63 - 4096, 0, 1), 16 * 1024),
    ],
)
def test_available_memory_is_the_hosts_or_the_containers(groups, files, expected, tmp_path):
    assert available_host_bytes(linux(tmp_path, groups, files)) == expected


def test_available_memory_of_a_kernel_without_groups(tmp_path):
    host = linux(tmp_path, "", {})
    (host / "proc/self/cgroup").unlink()
    assert available_host_bytes(host) == 64 * 1024


def test_available_memory_of_this_machine_and_of_one_that_is_no_linux(tmp_path):
    assert available_host_bytes(tmp_path) is None
    here = available_host_bytes()
    assert here is None or 2**20 < here < 2**50


def test_powers_of_two():
    for bytes_ in range(1, 300):
        assert power_of_two(bytes_) == next(2**n for n in range(20) if 2**n >= bytes_)
    assert host_states.STATE_BYTES == 12
