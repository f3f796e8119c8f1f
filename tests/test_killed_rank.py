"""A rank of a job under torchrun is killed: the job ends at once and says which. Started again it goes on as if nothing had been."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.test_pretrain import MODEL, ROOT, data, numbers, records, train  # noqa: F401 (a fixture)


def test_kill_and_restart_equal_a_run_that_nobody_killed(data, tmp_path):  # noqa: F811
    flags = [*MODEL, *data, "--context-parallel-size", 2, "--train-iters", 30, "--seq-length", 512]
    train([*flags, "--log-jsonl", tmp_path / "straight"], ranks=2)

    flags += ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", 4]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 0,
               "pretrain_llama.py", *flags, "--log-jsonl", log]  # fmt: skip
    job = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (log.exists() and len(log.read_text().splitlines()) > 6):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    victim = next(pid for pid in workers if "\0RANK=1\0" in "\0" + Path(f"/proc/{pid}/environ").read_text())
    os.kill(int(victim), signal.SIGKILL)
    start = time.monotonic()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1 and time.monotonic() - start < 20
    named = rf"\[rank 0\] error: rank 1 \(host \S+, pid {victim}\) ended (during|after) step \d+ .*--load {tmp_path}/ckpt"
    assert re.search(named, errors), errors
    assert len(records(log)) < 30, "else it was killed too late to tell anything"

    train([*flags, "--log-jsonl", log], ranks=2)
    assert numbers(log) == numbers(tmp_path / "straight")
