"""Runs that are watched: traces of the steps asked for with names that tell where the time goes, progress, heartbeats."""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from megacp.argument_checks import ArgumentError
from megacp.training import watchers
from tests.test_pretrain import MODEL, ROOT, records, train
from tests.tools.test_trace_summary import tool

FLAGS = [*MODEL, "--mock-data", "--mlp-tile-size", 32, "--loss-tile-size", 32]


def traces(folder):
    return sorted(path.name.rsplit(".", 5)[0] for path in folder.glob("*.pt.trace.json.gz"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five steps of two micro-batches, two ranks that share them, two stages, activations on the host; plain, and watched: rank 1
    is profiled in steps 2 and 3, each rank has a heartbeat.
    """
    folder = tmp_path_factory.mktemp("run")
    flags = [*FLAGS, "--context-parallel-size", 2, "--upipe-heads-per-stage", 2, "--activation-memory", "lean",
             "--global-batch-size", 2, "--train-iters", 5]  # fmt: skip
    profile = ["--profile", "--profile-step-start", 2, "--profile-step-end", 4, "--profile-ranks", 1]
    train([*flags, "--log-jsonl", folder / "plain"], ranks=2)
    train([*flags, *profile, "--log-jsonl", folder / "profiled", "--tensorboard-dir", folder / "runs",
           "--heartbeat-file", folder / "beat-{rank}.json"], ranks=2)  # fmt: skip
    return folder


def test_only_the_ranks_asked_for_write_only_the_steps_asked_for_and_nothing_else_changes(run):
    assert traces(run / "runs") == ["rank1-steps2-3"]
    assert [r["loss"] for r in records(run / "profiled")] == [r["loss"] for r in records(run / "plain")]


def test_ranges_name_step_phase_layer_stage_tile_collective_and_copy(run):
    (path,) = (run / "runs").glob("*.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    count = Counter(e["name"] for e in ranges)
    micro_batches, layers, tiles = 2 * 2, 2, 2  # in two steps; two tiles of 32 make 64 tokens of a rank
    assert count["step 2"] == count["step 3"] == 1 and count["step 1"] == count["step 4"] == 0
    assert count["forward"] == count["head"] == count["backward"] == micro_batches
    assert count["optimizer"] == 2 * 2  # clipping and update of each step
    for layer in range(layers):
        assert count[f"layer {layer} forward"] == count[f"layer {layer} backward"] == micro_batches
    for name in ("pack_q stage 0", "pack_q stage 1"):
        assert count[name] == 2 * tiles * layers * micro_batches  # forward and backward
    assert count["take_dq stage 1"] == tiles * layers * micro_batches and count["pack_do stage 1"] == layers * micro_batches
    for way in ("forward", "backward"):
        assert count[f"attention {way}"] == 2 * layers * micro_batches
    assert count["mlp"] == count["mlp backward"] == tiles * layers * micro_batches
    assert count["all-to-all wait"] >= count["all-to-all"] > 0
    assert min(count["tile 0"], count["tile 32"], count["copy to host"], count["copy to device"]) > 0

    def inside(inner, outer):
        return any(o["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= o["ts"] + o["dur"] for o in outer)

    def named(start):
        return [e for e in ranges if e["name"].startswith(start)]

    assert all(inside(e, named("step ")) for name in ("forward", "backward", "optimizer") for e in named(name))
    assert all(inside(e, named("forward")) for e in ranges if e["name"] in ("head", "mlp", "layer 0 forward"))
    assert all(inside(e, named("backward")) for e in ranges if e["name"] in ("mlp backward", "layer 1 backward", "pack_do stage 0"))


def test_the_summary_of_a_real_trace_adds_up(run):
    (path,) = (run / "runs").glob("*.gz")
    summary = tool.summarize(tool.read_trace(path))
    assert (summary.rank, summary.steps, summary.has_gpu) == (1, 2, False)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [e["dur"] for e in events if e.get("cat") == "user_annotation" and e["name"] in ("step 2", "step 3")]
    assert sum(summary.step.values()) == pytest.approx(sum(steps) / 2, rel=0.05)
    assert set(tool.PHASES) <= summary.phases.keys()
    for phase in ("forward", "head", "backward"):
        assert summary.phases[phase]["compute"] > 0
    assert summary.step["all_to_all"] > 0 and summary.step["comm"] > 0 and summary.kernels["gemm"] > 0 and summary.kernels["attention"] > 0
    assert tool.text(summary).count("\n") > 8


def test_a_run_that_ends_before_the_last_profiled_step_keeps_what_there_is(tmp_path):
    train([*FLAGS, "--train-iters", 3, "--profile", "--profile-dir", tmp_path])  # from its last step by default
    assert traces(tmp_path) == ["rank0-steps3-3"]
    (path,) = tmp_path.glob("*.gz")
    assert tool.read_trace(path).steps == 1


def test_each_rank_has_its_heartbeat(run):
    for rank in range(2):
        state = json.loads((run / f"beat-{rank}.json").read_text())
        assert (state["rank"], state["step"], state["phase"]) == (rank, 5, "ended")


def test_a_run_tells_its_progress_and_ends_when_it_breaks(tmp_path):
    beat = tmp_path / "beat.json"
    flags = [*MODEL, "--mock-data", "--train-iters", 10, "--lr", 1e30, "--lr-warmup-iters", 0, "--global-batch-size", 40,
             "--progress-interval", 0.02, "--heartbeat-file", beat]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "pretrain_llama.py", *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1 and " is nan at step 2 " in done.stderr, done.stderr
    assert json.loads(beat.read_text())["phase"] == "failed"
    lines = re.findall(r"^step  1/10 \| (\w+) .*\| micro-batch +(\d+)/40 \| +([\d.]+)% \| ", done.stdout, re.MULTILINE)
    assert len(lines) > 1 and {phase for phase, *_ in lines} <= {"forward", "head", "backward", "optimizer"}
    places = [(int(number), float(share)) for _, number, share in lines]
    assert places == sorted(places) and places[-1][1] <= 100


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder whose permissions promise what it does not keep")
def test_a_profiled_rank_tries_the_place_on_its_own_host(monkeypatch):
    monkeypatch.setattr(watchers.dist, "get_rank", lambda: 3)
    args = argparse.Namespace(heartbeat_file=None, progress_interval=0.0, profile=True, profile_ranks=[3], profile_dir="/proc/traces",
                              tensorboard_dir=None, profile_step_start=1, profile_step_end=2)  # fmt: skip
    with pytest.raises(ArgumentError, match="--profile-dir /proc/traces: no file can be made in /proc"):
        with watchers.step_watchers(args, None, None, torch.device("cpu"), console=False):
            pass
