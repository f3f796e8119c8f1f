"""Whole training runs with activations on disk: the same numbers as without, and an end with one clear line when the disk fails."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_pretrain import train

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --kv-channels 8 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 258 --seq-length 128 --mlp-tile-size 24 --lr 1e-2 --device cpu --fp32 --mock-data"
).split()


def numbers(log):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, log.read_text().splitlines())]


def test_a_run_on_disk_gives_the_numbers_of_one_in_memory_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = [*MODEL, "--train-iters", 3, "--context-parallel-size", 2]
    places = {"gpu": [], "disk": ["--disk-offload-dir", disk, "--disk-memory-gib", 0.01, "--host-memory-gib", 0.1]}
    for place, more in places.items():
        train([*flags, "--activation-memory", place, *more, "--log-jsonl", tmp_path / f"{place}.jsonl"], ranks=2)
    assert numbers(tmp_path / "disk.jsonl") == numbers(tmp_path / "gpu.jsonl")
    assert os.listdir(disk) == []


FAULTS = {
    "write": r"writing bytes [\d,]+ to [\d,]+ of \S+ failed: .*Input/output error",
    "flip": r"reading back bytes [\d,]+ to [\d,]+ of \S+ failed: their CRC-32 is",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_ends_the_job_in_seconds_with_one_line(tmp_path, fault):
    flags = [*MODEL, "--train-iters", 100000, "--log-interval", 1000, "--context-parallel-size", 2]
    flags += ["--activation-memory", "disk", "--disk-offload-dir", tmp_path]
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 tests/memory/failing_disk.py".split()
    done = subprocess.run(
        [sys.executable, *launch, fault, "1", "2", *map(str, flags)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip
    ended = time.time()
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error: --disk-offload-dir" in line]
    assert re.search(rf"^\[rank 1\] error: --disk-offload-dir {tmp_path}: {FAULTS[fault]}", line), line
    assert "rank      : 1" in done.stderr and "exitcode  : 1 " in done.stderr, "the launcher names another rank"
    assert ended - float(re.search(r"(?m)^fault at (\S+)$", done.stdout)[1]) < 20
    assert os.listdir(tmp_path) == []
