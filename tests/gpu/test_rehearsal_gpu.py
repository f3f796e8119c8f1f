"""Rehearsals on a GPU: the stub takes the memory that the real kernel takes; the allocator's history is written."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--rehearse-world-size 8 --model llama3-8b --num-layers 2 --context-parallel-size 8 --seq-length 131072 "
    "--attention-mask causal --mock-data --mlp-tile-size 1024 --loss-tile-size 1024 --train-iters 2"
).split()


def rehearse(file, *flags):
    command = [sys.executable, "pretrain_llama.py", *FLAGS, "--rehearse-json", str(file), *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("plan", ["gpu", "lean"])
def test_the_stub_takes_the_memory_of_the_kernel(plan, tmp_path):
    real = rehearse(tmp_path / "real", "--activation-memory", plan)
    stub = rehearse(tmp_path / "stub", "--activation-memory", plan, "--rehearse-attention", "stub")
    assert stub["attention"] == f"stub-{real['attention']}"
    for phase, memory in real["phases"].items():
        assert stub["phases"][phase]["peak"] == pytest.approx(memory["peak"], rel=0.02), phase
    assert stub["part_seconds"]["attention"] < real["part_seconds"]["attention"]


@pytest.mark.parametrize("plan", ["gpu", "lean"])
def test_idle_layers_take_the_memory_of_layers_that_compute(plan, tmp_path):
    flags = ("--activation-memory", plan, "--rehearse-attention", "stub", "--num-layers", 6)
    whole = rehearse(tmp_path / "whole", *flags)
    few = rehearse(tmp_path / "few", *flags, "--rehearse-layers", 2)
    assert few["phases"] == whole["phases"] and few["settings"]["rehearsed_layers"] == 2
    # The allocator has fewer kinds of blocks to serve, and holds less: 5% with expandable segments, 11% without.
    assert few["peak"] <= few["reserved"] <= whole["reserved"]


def test_the_history_of_allocations_is_written(tmp_path):
    rehearse(tmp_path / "report", "--record-memory-history", tmp_path / "history.pickle", "--rehearse-attention", "stub")
    history = pickle.loads((tmp_path / "history.pickle").read_bytes())
    assert any(history["device_traces"])
