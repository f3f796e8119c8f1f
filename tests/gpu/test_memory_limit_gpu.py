"""--gpu-memory-limit-gib makes a GPU as small as that for PyTorch: what fits runs, what does not ends with an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacp.memory.units import GIB

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def rehearse(limit, report):
    flags = (
        "--rehearse-world-size 2 --rehearse-attention stub --context-parallel-size 2 --model llama-tiny --seq-length 1048576 --mock-data "
        f"--activation-memory gpu --train-iters 2 --gpu-memory-limit-gib {limit} --rehearse-json {report}"
    )
    command = [sys.executable, "pretrain_llama.py", *flags.split()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_step_that_needs_more_than_the_limit_ends_with_an_error(tmp_path):
    done = rehearse(40, tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["reserved"] < 40 * GIB
    fits = rehearse(1.1 * report["reserved"] / GIB, tmp_path / "fits.json")
    assert fits.returncode == 0, fits.stderr
    too_small = rehearse(0.9 * report["peak"] / GIB, tmp_path / "none.json")
    assert too_small.returncode == 1 and "out of GPU memory" in too_small.stderr
    assert rehearse(10_000, tmp_path / "none.json").returncode == 2
