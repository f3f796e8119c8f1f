"""A rank killed in the middle of a step through NCCL: the others end at once and say which; the restart goes on bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count()
if GPUS < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--model llama-tiny --hidden-size 512 --kv-channels 64 --ffn-hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 "
    f"--mock-data --seq-length 65536 --context-parallel-size {min(GPUS, 8)} --deterministic --train-iters 30 --save-interval 4"
)
RANKS = min(GPUS, 8)


def start(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts", "0"]
    command += f"pretrain_llama.py {FLAGS} --log-jsonl {folder}/log --save {folder}/ckpt --load {folder}/ckpt".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(folder):
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_kill_and_restart(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    undisturbed, job = start(straight), start(broken)  # starting takes longer than their steps
    while len(records(broken)) < 7:
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    last = next(pid for pid in workers if f"\0RANK={RANKS - 1}\0" in f"\0{Path(f'/proc/{pid}/environ').read_text()}")
    os.kill(int(last), signal.SIGKILL)
    killed = time.monotonic()
    output, _ = job.communicate(timeout=120)
    seconds = time.monotonic() - killed
    assert job.returncode == 1 and seconds < 20, f"{seconds:.1f} s\n{output}"
    assert re.search(rf"\[rank 0\] error: rank {RANKS - 1} \(host \S+, pid {last}\) ended (during|after) step \d+", output), output
    print(f"{RANKS} ranks: all ended {seconds:.1f} s after one was killed")

    job = start(broken)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and "loaded" in output, output
    output, _ = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, output
    assert [(r["step"], r["loss"]) for r in records(broken)] == [(r["step"], r["loss"]) for r in records(straight)]
