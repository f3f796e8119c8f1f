"""Profiles and progress on a GPU: kernels fall into their phases, and nobody waits for the GPU to know how far it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megacp.training.progress_monitor import CudaMarks
from tests.tools.test_trace_summary import tool

ROOT = Path(__file__).parents[2]


def test_marks_say_what_the_gpu_has_passed_without_waiting_for_it():
    marks = CudaMarks()
    before = marks.record()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    after = marks.record()
    assert marks.passed(before) and not marks.passed(after)
    assert time.perf_counter() - start < 0.3
    torch.cuda.synchronize()
    assert marks.passed(after) and marks.seconds(before, after) > 0.3


def test_a_rehearsed_rank_is_profiled_watched_and_summed_up(tmp_path):
    """One rank of 8 with its activations on the host: collectives are local copies there, the copies to the host are real."""
    flags = (
        "--rehearse-world-size 8 --model llama3.2-1b --num-layers 4 --context-parallel-size 8 --seq-length 131072 --mock-data "
        f"--activation-memory lean --train-iters 4 --profile --profile-step-start 3 --profile-step-end 5 --profile-dir {tmp_path} "
        f"--heartbeat-file {tmp_path / 'beat.json'} --progress-interval 0.05 --rehearse-json {tmp_path / 'report'}"
    )
    done = subprocess.run(
        [sys.executable, "pretrain_llama.py", *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("rank0-steps3-4.*.pt.trace.json.gz")
    summary = tool.summarize(tool.read_trace(path))
    print(tool.text(summary))
    assert summary.has_gpu and summary.steps == 2
    assert set(tool.PHASES) <= summary.phases.keys()
    step = json.loads((tmp_path / "report").read_text())["step_seconds"]
    assert sum(summary.step.values()) / 1e6 == pytest.approx(step, rel=0.3)
    computing = {phase: parts["compute"] for phase, parts in summary.phases.items()}
    assert computing["backward"] > computing["forward"] > computing.get("other", 0.0)  # launches are told apart, across threads
    assert min(summary.kernels[name] for name in ("attention", "gemm", "element-wise", "host copies")) > 0
    assert json.loads((tmp_path / "beat.json").read_text())["phase"] == "ended"
    assert "| backward  layer " in done.stdout
