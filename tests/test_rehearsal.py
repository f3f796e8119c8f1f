"""Rehearsals as their users run them, on a CPU: one rank of 8, numbers finite, states as on 8, a report that adds up."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacp.memory.policy import PLANS
from megacp.memory.store import Geometry
from megacp.rehearsal import SharedRoom

ROOT = Path(__file__).parents[1]
LAYERS, HIDDEN, WIDTH, HEADS, GROUPS, VOCAB, TOKENS = 2, 64, 128, 16, 8, 512, 4096
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {WIDTH} --kv-channels 4 --num-attention-heads {HEADS} "
    f"--num-query-groups {GROUPS} --vocab-size {VOCAB} --untie-embeddings-and-output-weights --context-parallel-size 8 "
    f"--seq-length {8 * TOKENS} --mock-data --device cpu --mlp-tile-size 512 --loss-tile-size 512"
).split()
LAYER_PARAMETERS = 2 * HIDDEN * HEADS * 4 + 2 * HIDDEN * GROUPS * 4 + 3 * HIDDEN * WIDTH + 2 * HIDDEN
PARAMETERS = LAYERS * LAYER_PARAMETERS + 2 * VOCAB * HIDDEN + HIDDEN


def run(*flags, env=()):
    return subprocess.run(
        [sys.executable, "pretrain_llama.py", *MODEL, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env),
    )  # fmt: skip


def rehearse(file, *flags, ranks=8):
    done = run("--rehearse-world-size", ranks, "--rehearse-json", file, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_a_stub_rehearsal_with_activations_on_the_host(tmp_path):
    flags = ("--rehearse-attention", "stub", "--rehearse-rank", 3, "--activation-memory", "host", "--bf16")
    report, text = rehearse(tmp_path / "r", *flags)
    unit = TOKENS * HIDDEN * 2
    assert (report["rank"], report["attention"], report["u"], report["tokens_per_rank"]) == (3, "stub-fa4", unit, TOKENS)
    assert report["gradients"] == PARAMETERS * 4 / 8  # every first dimension here is a multiple of 8
    assert 0 <= report["states"] - 3 * report["gradients"] < 8192  # and a counter of steps for each weight
    lse = 4 * HEADS * TOKENS
    assert report["host"] == LAYERS * (2 * unit + lse) and report["disk"] == 0
    assert report["peak"] == max(phase["peak"] for phase in report["phases"].values())
    assert set(report["phases"]) == {"embedding", "layer forward", "between", "head", "layer backward", "optimizer"}
    assert report["phases"]["optimizer"]["added"] < 0.1 * unit  # the update needs nothing of its own
    assert sum(report["part_seconds"].values()) <= report["step_seconds"]
    assert all(report["part_seconds"][part] > 0 for part in ("projections", "all-to-all", "mlp", "head", "optimizer"))
    assert text.count("step ") >= 3 and "layer backward" in text and "tokens/s/GPU, without attention" in text


def test_a_real_rehearsal_with_data_parallelism_and_everything_on_the_device(tmp_path):
    flags = ("--seq-length", 1024, "--train-iters", 1, "--fp32", "--activation-memory", "gpu")
    report, _ = rehearse(tmp_path / "r", *flags, "--rehearse-rank", 12, ranks=16)
    assert report["attention"] == "torch" and report["part_seconds"]["attention"] > 0
    assert report["gradients"] == PARAMETERS * 4 / 16
    assert report["host"] == report["disk"] == 0


def test_a_counted_step_beyond_the_limit_ends_as_on_a_gpu(tmp_path):
    flags = ("--seq-length", 1024, "--train-iters", 1, "--activation-memory", "gpu", "--rehearse-attention", "stub")
    report, _ = rehearse(tmp_path / "r", *flags, "--gpu-memory-limit-gib", 1)
    peak = report["peak"] / 2**30
    done = run("--rehearse-world-size", 8, *flags, "--gpu-memory-limit-gib", 0.99 * peak, "--rehearse-json", tmp_path / "none")
    assert done.returncode == 1 and not (tmp_path / "none").exists()
    assert "error: out of GPU memory: Step 1 took" in done.stderr and "Traceback" not in done.stderr


REFUSED = {
    "rank": (["--rehearse-world-size", 8, "--rehearse-rank", 8], "--rehearse-rank 8 .*; 7 works"),
    "no size": (["--rehearse-attention", "stub"], "--rehearse-attention stub needs --rehearse-world-size"),
    "saving": (["--rehearse-world-size", 8, "--save", "x"], "--rehearse-world-size 8 .*--save means nothing; without --save works"),
    "layout": (["--rehearse-world-size", 12], "--context-parallel-size 8 does not divide the number of ranks 12"),
}


def main(monkeypatch, *flags):
    """The entry point in this process, for what ends before any group is made."""
    import pretrain_llama

    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *MODEL, *map(str, flags)])
    return pretrain_llama.main()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rehearsed_is_refused(case, monkeypatch, capsys):
    flags, message = REFUSED[case]
    assert main(monkeypatch, *flags) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(monkeypatch, "--rehearse-world-size", 8) == 2
    assert "--rehearse-world-size 8 takes one process, and the launcher started 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rehearse-attention", "stub", "--attention-backend", "reference"], "--attention-backend reference has no stub"),
        (["--record-memory-history", "h"], "--record-memory-history h records the allocator of a GPU"),
    ],
)
def test_what_shows_only_on_the_device_is_refused_there(flags, message):
    done = run("--rehearse-world-size", 8, "--seq-length", 64, *flags)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_layers_of_one_plan_share_their_room_off_the_device():
    host, gpu = PLANS["host"], PLANS["gpu"]
    geometry = Geometry(
        tokens=64, hidden_size=8, num_stages=1, ulysses_degree=1, stage_heads=2, head_dim=4, tile_size=16, dtype=torch.float32
    )
    store = SharedRoom([host, gpu, host, PLANS["lean"]], geometry, torch.device("cpu"))
    assert store.region(0, "h") is store.region(2, "h") is not store.region(3, "h")
    assert store.region(1, "h") is None and store.region(0, "output") is not store.region(0, "h")
    assert [store.plans[layer] for layer in range(4)] == [host, gpu, host, PLANS["lean"]]
