"""--optimizer-cpu-offload on a GPU: the same losses, the states gone from its memory, checkpoints that go either way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megacp.memory.units import GIB
from megacp.model.config import preset
from megacp.planning.host_states import power_of_two

ROOT = Path(__file__).parents[2]
HIDDEN, WIDTH, LAYERS = 1024, 4096, 3
FLAGS = (
    f"--model llama-tiny --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {WIDTH} --num-attention-heads 8 "
    "--num-query-groups 8 --kv-channels 128 --mock-data --seq-length 1024 --mlp-tile-size 256 --loss-tile-size 256 --fp32 "
    "--attention-backend reference --lr 1e-3 --lr-decay-iters 4 --activation-memory gpu --clip-grad 0.5"
)
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * WIDTH + 2 * HIDDEN) + preset("llama-tiny").vocab_size * HIDDEN + HIDDEN
OFFLOAD = "--optimizer-cpu-offload"

# One process for all runs: each of its own would start torch, a GPU and NCCL anew.
RUNS = """
import gc, sys, torch, pretrain_llama
for line in sys.stdin:
    sys.argv = ["pretrain_llama.py", *line.split()]
    assert pretrain_llama.main() == 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Records of runs by name. `back and forth`: a step offloaded, one not, one offloaded again, through checkpoints."""
    folder = tmp_path_factory.mktemp("offload")
    saved = f"--save {folder / 'saved'} --load {folder / 'saved'}"
    runs = [
        ("plain", "--train-iters 3"), ("offloaded", f"--train-iters 3 {OFFLOAD}"),
        ("plain, accumulating", "--train-iters 3 --global-batch-size 2"),
        ("offloaded, accumulating", f"--train-iters 3 --global-batch-size 2 {OFFLOAD}"),
        *(("back and forth", f"--train-iters {step} {saved} {flag}") for step, flag in ((1, OFFLOAD), (2, ""), (3, OFFLOAD))),
    ]  # fmt: skip
    lines = "\n".join(f"{FLAGS} {flags} --log-jsonl {folder / name.replace(' ', '_')}" for name, flags in runs)
    done = subprocess.run(
        [sys.executable, "-c", RUNS], cwd=ROOT, input=lines, capture_output=True, text=True, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: [json.loads(line) for line in (folder / name.replace(" ", "_")).read_text().splitlines()] for name, _ in runs}


@pytest.mark.parametrize(
    "name, like", [("offloaded", "plain"), ("offloaded, accumulating", "plain, accumulating"), ("back and forth", "plain")]
)
def test_losses_and_norms_are_those_without(name, like, logs):
    assert [record["step"] for record in logs[name]] == [1, 2, 3]
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in logs[name]] == pytest.approx([record[key] for record in logs[like]], rel=1e-5), key
    assert logs[like][2]["loss"] < logs[like][0]["loss"], "the comparison says little when nothing is learned"
    assert logs[like][0]["grad_norm"] > 0.5, "nor when nothing is clipped"


@pytest.mark.parametrize("kind", ["", ", accumulating"])
def test_the_gpu_is_rid_of_the_states(kind, logs):
    before, after = (logs[name + kind][-1]["peak_memory_gib"] for name in ("plain", "offloaded"))
    assert before - after > 0.95 * 12 * PARAMETERS / GIB


def test_pinned_memory_is_what_the_plan_counts():
    """Were PyTorch's allocator of pinned memory to give out other than powers of two, plans would be wrong."""
    torch.empty(1, device="cuda")
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    pinned = torch.empty(5 * 2**20, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
    assert pinned.nbytes == 5 * 2**20 and taken == power_of_two(pinned.nbytes) == 8 * 2**20


def test_a_rehearsal_says_where_the_states_are(tmp_path):
    flags = f"{FLAGS} {OFFLOAD} --rehearse-world-size 2 --train-iters 2 --rehearse-json {tmp_path / 'report'}".split()
    done = subprocess.run([sys.executable, "pretrain_llama.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report").read_text())
    assert report["states"] < 0.3 * 6 * PARAMETERS  # cuBLAS has taken its workspaces, 64 MiB on an H200
    assert 16 * PARAMETERS / 2 <= report["host_states"] < 24 * PARAMETERS / 2
    assert "in host memory" in done.stdout
