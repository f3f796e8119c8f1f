"""The benchmark on a GPU: exchanges under way arrive, kernels and copies are told apart, memory is what the planner says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megacp.benchmark.stand_in import stand_in
from megacp.context_parallel.all_to_all import all_to_all
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import plan_of
from megacp.model.config import preset
from megacp.planner import Job, layer_peaks

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
CYCLES = 50_000_000  # some 30 ms


def test_exchanges_arrive_though_they_run_beside_what_is_computed():
    group = stand_in(4, DEVICE)
    sent = torch.zeros(4, 2**20, device=DEVICE)
    torch.cuda._sleep(CYCLES)
    sent += 1  # after the pause: an exchange that does not wait for the computing stream sends zeros
    exchange = all_to_all(sent, group)
    with torch.cuda.stream(group._stream):
        torch.cuda._sleep(CYCLES)
    second = all_to_all(sent * 2, group)
    total = exchange.wait() + second.wait()  # a reader that does not wait sees what was in memory
    assert torch.equal(total, torch.full_like(sent, 3.0))


@pytest.mark.parametrize("plan", ["gpu", "lean"])
def test_a_layers_time_by_part_and_its_memory(plan, tmp_path):
    flags = "layer --model llama3.2-1b --ranks 8 --seq-length 64K --heads-per-stage 8 --mlp-tile-size 2K --repeats 2".split()
    command = [sys.executable, "tools/benchmark.py", *flags, "--activation-memory", plan, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "layer.json").read_text())["rows"]
    parts = {(part["phase"], part["part"]): part for part in row["parts"]}
    for phase in ("forward", "backward"):
        # The ceiling's product runs at the power limit, where an H200's clock is 1,400 to 1,550 MHz; a short one at 1,980.
        assert all(0 < parts[phase, part]["ceiling_share"] < 1.5 for part in ("attention", "gemm"))
        assert parts[phase, "device copies"]["rate"] > 1e11  # bytes are in the trace
        assert (phase, "host copies") in parts or plan == "gpu"
    worked = sum(part["exposed_s"] for part in row["parts"] if part["part"] != "idle")
    assert 0 < worked < 1.2 * row["seconds"]  # profiling slows the host, not the kernels
    config = preset("llama3.2-1b")
    job = Job(config, build_head_schedule(32, 8, 8, 8), 8192, 8, 2048, 4096, torch.bfloat16, kernel=row["attention"])
    predicted = layer_peaks(job, plan_of(plan, "selective", None))
    assert row["forward_u"] * job.unit == pytest.approx(predicted.forward, rel=0.05)
    assert row["backward_u"] * job.unit == pytest.approx(predicted.backward - 4 * config.layer_parameters(), rel=0.05)
