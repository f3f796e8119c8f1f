"""Answers of the planning tool against the planner asked step by step."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megacp.training.capacity as capacity
from megacp.memory.policy import PLANS
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.planner import predict
from megacp.training.activation_plans import activation_plans
from megacp.training import run_logs
from megacp.training.rehearsals import job_settings
from megacp.training.speeds import speeds_of
from megacp.training.step_time import predict_step_time
from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "plan_memory.py"
SMALL = "--model llama-tiny --num-layers 3 --mlp-tile-size 2048 --loss-tile-size 1024".split()


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def planned(*flags):
    return capacity.parse_planned([*SMALL, *flags], "")


def answer(tool, capsys, *flags):
    status = tool.main([*SMALL, *flags, "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out or "{}"), printed.err


def test_json_is_the_planners_prediction_and_adds_up(tool, capsys):
    status, found, _ = answer(tool, capsys, "--gpus", "4", "--seq-length", "32768", "--activation-memory", "lean")
    args, job = capacity.job_of(planned("--activation-memory", "lean"), 4, 32768)
    plans = activation_plans(args, job, capacity.CPU)
    assert status == 0 and found["problem"] is None
    assert sum(found["gpu_parts_bytes"].values()) == found["gpu_bytes"] == predict(job, plans).device_bytes
    assert found["host_bytes"] == planned_bytes(plans, job.geometry, "host") > 0 == found["disk_bytes"]
    assert found["context_parallel_size"] == 4 and found["tokens_per_rank"] == 8192 and len(found["plans"]) == 3
    assert found["budgets_gib"]["gpu"] == pytest.approx(72)


def test_a_cpus_run_is_planned_in_its_own_dtype(tool, capsys):
    job = ("--gpus", "2", "--seq-length", "8192", "--activation-memory", "gpu")
    on_gpu, on_cpu, told, cpu_bf16 = (
        answer(tool, capsys, *job, *flags.split())[1] for flags in ("", "--device cpu", "--fp32", "--device cpu --bf16")
    )
    assert (on_gpu["dtype"], on_cpu["dtype"]) == ("bfloat16", "float32") and on_cpu["unit_bytes"] == 2 * on_gpu["unit_bytes"]
    assert on_cpu["gpu_bytes"] == told["gpu_bytes"] > cpu_bf16["gpu_bytes"] == on_gpu["gpu_bytes"]


def test_states_on_the_host_are_shown_there(tool, capsys):
    flags = ("--gpus", "4", "--seq-length", "32768", "--activation-memory", "host", "--optimizer-cpu-offload")
    _, found, _ = answer(tool, capsys, *flags)
    _, near, _ = answer(tool, capsys, *flags[:-1])
    assert found["gpu_parts_bytes"]["states"] == 0 < near["gpu_parts_bytes"]["states"]
    assert found["host_bytes"] - near["host_bytes"] == found["host_state_bytes"] > near["host_state_bytes"] == 0
    assert tool.main([*SMALL, *flags]) == 0
    assert f"of it states {found['host_state_bytes'] / GIB:15.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("memory", [("--activation-memory", "gpu"), ("--upipe-query-chunk", "4096"), ("--host-memory-gib", "0.01")])
def test_the_longest_fits_and_a_step_more_does_not(tool, capsys, memory):
    status, found, _ = answer(tool, capsys, "--gpus", "2", "--longest", "--gpu-memory-gib", "0.085", *memory)
    length, step = found["longest_seq_length"], found["step"]
    assert status == 0 and step == 2 * 2048 and length % step == 0
    args = planned("--gpu-memory-gib", "0.085", *memory)
    assert capacity.plan_job(args, 2, length).problem is None
    assert found["gpu_bytes"] <= 0.085 * GIB
    assert capacity.plan_job(args, 2, length + step).problem


@pytest.mark.parametrize("flags", [
    ("--gpus", "8", "--model", "llama3.2-1b", "--gpu-memory-gib", "4.6"),  # whose tiles are of 16,384 tokens
    ("--gpus", "2", "--model", "llama-tiny", "--micro-batch-size", "3", "--gpu-memory-gib", "0.5"),
])  # fmt: skip
def test_the_longest_is_looked_for_in_steps_of_8192_tokens_a_rank(tool, capsys, flags):
    assert tool.main(["--json", "--activation-memory", "lean", *flags, "--longest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 8192 * int(flags[1]) and found["longest_seq_length"] >= found["step"]


def test_the_longest_ends_where_no_kernel_takes_the_document(tool, capsys, monkeypatch):
    flags = ("--gpus", "2", "--gpu-memory-gib", "0.085", "--activation-memory", "gpu")
    _, by_memory, _ = answer(tool, capsys, *flags, "--longest")
    step, tokens = by_memory["step"], by_memory["longest_seq_length"]
    assert by_memory["ended_by"] == "memory" and by_memory["notes"] == []
    monkeypatch.setattr(capacity, "longest_document", lambda head_dim: tokens - 1)
    status, found, _ = answer(tool, capsys, *flags, "--longest")
    assert status == 0 and found["longest_seq_length"] == tokens - step and found["ended_by"] == "kernel"
    assert tool.main([*SMALL, *flags, "--longest"]) == 0
    said = capsys.readouterr().out
    assert f"{tokens - step:,} tokens; the kernel ends it, not the memory: a GPU's attention takes {tokens - 1:,} tokens" in said
    assert answer(tool, capsys, *flags, "--longest", "--attention-backend", "reference")[1]["longest_seq_length"] == tokens

    status, found, _ = answer(tool, capsys, *flags, "--seq-length", str(tokens))
    assert status == 0 and found["problem"] is None
    assert f"less than --seq-length {tokens}; in shorter documents" in found["notes"][0]
    tool.main([*SMALL, *flags, "--seq-length", str(tokens), "--attention-mask", "causal"])
    said = capsys.readouterr().out
    assert f"note: a GPU's attention kernels take {tokens - 1:,} tokens" in said and "cannot run" in said
    monkeypatch.setattr(capacity, "longest_document", lambda head_dim: step - 1)
    assert "a smaller --mlp-tile-size works" in answer(tool, capsys, *flags, "--longest")[2]


def test_a_long_search_says_what_it_counts(tool, capsys, monkeypatch):
    monkeypatch.setattr(tool, "QUIET_S", 0.0)
    _, found, said = answer(tool, capsys, "--gpus", "2", "--gpu-memory-gib", "0.085", "--activation-memory", "gpu", "--longest")
    assert f"s; counting {found['longest_seq_length'] + found['step']:,} tokens" in said


def test_fewest_gpus_are_the_first_that_fit(tool, capsys):
    flags = ("--gpu-memory-gib", "0.08", "--activation-memory", "host")
    status, found, _ = answer(tool, capsys, "--fewest-gpus", "--seq-length", "32768", *flags)
    args = planned(*flags)
    problems = {count: capacity.plan_job(args, count, 32768).problem for count in (1, 2, 4, 8)}
    assert status == 0 and found["fewest_gpus"] == min(count for count, problem in problems.items() if not problem)
    assert problems[1], "else the answer is no test"


def test_counts_of_gpus_fit_the_heads():
    assert capacity.gpu_counts(planned())[:5] == [1, 2, 4, 8, 16]  # 8 heads: beyond 8, more data-parallel ranks
    assert capacity.gpu_counts(capacity.parse_planned(["--model", "llama3.2-3b"], ""))[:6] == [1, 2, 4, 8, 24, 48]
    assert capacity.gpu_counts(planned("--context-parallel-size", "2"))[:3] == [2, 4, 8]


@pytest.mark.parametrize("threshold", [0, 1, 2, 57, 99, 100])
@pytest.mark.parametrize("guess", [-5, 1, 56, 58, 100, 1000])
def test_the_search_finds_the_border_from_any_guess(threshold, guess):
    assert capacity.largest(lambda number: number <= threshold, guess, 100) == threshold


def test_fits_agrees_with_the_whole_plan():
    args = planned("--gpu-memory-gib", "0.1", "--host-memory-gib", "0.02")
    for length in (8192, 32768):
        assert capacity.fits(args, 2, length) == (capacity.plan_job(args, 2, length).problem is None)


@pytest.mark.parametrize("flags", ["--gpu-memory-gib 0.03", "--gpu-memory-gib 0.065 --host-memory-gib 0.001",
                                   "--activation-memory host --host-memory-gib 0.001",
                                   "--optimizer-cpu-offload --activation-memory host --host-memory-gib 0.02",
                                   "--optimizer-cpu-offload --gpu-memory-gib 0.06 --host-memory-gib 0.01"])  # fmt: skip
def test_what_a_refusal_says_works_works(tool, capsys, flags):
    job = ["--gpus", "4", "--seq-length", "32768", *flags.split()]
    status, found, error = answer(tool, capsys, *job)
    assert status == 1 and found["problem"] in error
    words = re.findall(r"(--(?:gpu|host)-memory-gib)", error)[-1 if "auto" in error else 0]
    value = re.findall(r"([\d.]+)(?= works| or --)", error)[-1 if "auto" in error else 0]
    assert answer(tool, capsys, *job, words, value)[0] == 0, error


@pytest.mark.parametrize(
    "limit", ["--gpu-memory-limit-gib 0.04", "--gpu-memory-limit-gib 0.09 --recompute-granularity none",
              "--gpu-memory-gib 0.08 --recompute-granularity none"])  # fmt: skip
def test_a_gpu_too_small_is_told_by_the_flag_that_was_given(tool, capsys, limit):
    flag, value, *none = limit.split()
    job = ["--gpus", "4", "--seq-length", "32768", *none]
    status, _, error = answer(tool, capsys, *job, flag, value)
    assert status == 1 and f"{flag} {value}" in error and ("which keeps all on the GPU" in error) == bool(none)
    assert ("all activations elsewhere" in error) != bool(none)
    assert answer(tool, capsys, *job, flag, re.search(r"; ([\d.]+) ", error)[1])[0] == 0, error
    if none:
        assert "or --recompute-granularity selective works" in error
        assert answer(tool, capsys, *job[:4], flag, value)[0] == 0


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--seq-length 4096", "--gpus is missing; --gpus 8 works"),
        ("--gpus 2", "--seq-length is missing; --seq-length 1048576 works"),
        ("--gpus 2 --longest --seq-length 4096", "--seq-length 4096 is what --longest asks for; without --seq-length works"),
        ("--gpus 2 --fewest-gpus --seq-length 4096", "--gpus 2 is what --fewest-gpus asks for; without --gpus works"),
        ("--gpus 6 --seq-length 4096 --context-parallel-size 3", "--context-parallel-size 3 does not divide --num"),
        ("--gpus 2 --seq-length 4096 --upipe-heads-per-stage 3", "--upipe-heads-per-stage 3 is not a multiple"),
        ("--gpus 2 --seq-length 4096 --model llama4", "--model llama4 is not known"),
        ("--gpus 2 --longest --gpu-memory-gib 0.001", "not even --seq-length 4096 fits: --gpu-memory-gib 0.001 is less than"),
    ],
)
def test_errors_name_the_flag_and_what_works(tool, capsys, flags, said):
    status, _, error = answer(tool, capsys, *flags.split())
    assert status == 1 and said in error


def test_the_table_is_aligned_and_names_units(tool, capsys):
    assert tool.main([*SMALL, "--gpus", "2", "--seq-length", "8192", "--host-memory-gib", "1", "--disk-memory-gib", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = [line for line in lines if re.match(r"  (states|weights|gathered|buffers|total|host|disk)", line)]
    assert len(figures) >= 6 and {re.match(r".*?\d\.\d\d", line).end() for line in figures} == {32}
    assert "GPU memory per rank          GiB" in lines and any("layers 0-2: h gpu" in line for line in lines)


def test_time_and_named_buffers_are_in_both_outputs(tool, capsys):
    flags = ("--gpus", "2", "--seq-length", "8192", "--activation-memory", "gpu", "--global-batch-size", "2")
    status, found, _ = answer(tool, capsys, *flags)
    args, job = capacity.job_of(planned(*flags[4:]), 2, 8192)
    plans = activation_plans(args, job, capacity.CPU)
    assert status == 0 and sum(found["gpu_buffers_bytes"].values()) == found["gpu_parts_bytes"]["buffers"]
    time = predict_step_time(job, plans, speeds_of("H100"), micro_batches=2)
    assert found["step_seconds"] == time.seconds == pytest.approx(sum(found["step_parts_seconds"].values()))
    assert found["tokens_per_s_per_gpu"] == pytest.approx(8192 / time.seconds)
    assert found["allocator_margin_bytes"] == pytest.approx(found["gpu_bytes"] / 9, abs=1)
    assert tool.main([*SMALL, *flags]) == 0
    text = capsys.readouterr().out
    largest = max(found["gpu_buffers_bytes"], key=found["gpu_buffers_bytes"].get)
    assert "  buffers" in text and found["gpu_peak_moment"] in text and f"    {largest} " in text and "tokens/s/GPU" in text
    assert "attention estimated: an H200's" in text and "allocator margin" in text


PAIRS = 8192 * 8193 // 2  # of one document


def report_of(path, device, **changes):
    """A rehearsal's report as far as it is read here, of a job of SMALL on 2 ranks."""
    job = capacity.job_of(planned("--activation-memory", "gpu"), 2, 8192)[1]
    plans = [PLANS["gpu"]] * 3
    report = {
        "world_size": 2, "device": device, "dtype": "bfloat16", "attention": "fa4", "tokens_per_rank": 4096, "reserved": None,
        "peak": predict(job, plans).device_bytes * 100 // 96, "step_seconds": 1.0, "copy_bytes_per_s": 50e9,
        "part_seconds": {"projections": 0.1, "all-to-all": 0.1, "attention": 0.2, "mlp": 0.2, "head": 0.1, "optimizer": 0.1},
        "settings": job_settings(job, plans, 1) | {"attention_pairs": PAIRS, "rehearsed_layers": 3},
    }  # fmt: skip
    path.write_text(json.dumps(report | changes))
    return str(path)


def test_predictions_against_rehearsals(tool, capsys, tmp_path):
    files = [report_of(tmp_path / "a.json", "cpu"), report_of(tmp_path / "b.json", "NVIDIA H200", peak=10**9)]
    assert tool.main(["--rehearsal", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "-4.00%" in lines[1] and "1 of 2 ranks" in lines[1] and lines[3].startswith("worst of 2: -9")
    assert tool.main(["--rehearsal", files[0], "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rehearsals"]
    assert found["error"] == pytest.approx(-0.04, abs=1e-4) and found["file"] == files[0]


def test_calibration_files_of_both_kinds(tool, capsys, tmp_path):
    exchanges = tmp_path / "a2a.json"
    exchanges.write_text(json.dumps({"all_to_all": [{"bytes_per_rank": 2**20, "seconds": 0.01, "gpus": 2}]}))
    job = ("--gpus", "2", "--seq-length", "8192", "--activation-memory", "gpu")
    status, found, _ = answer(tool, capsys, *job, "--calibrate", report_of(tmp_path / "r.json", "NVIDIA H200"), str(exchanges))
    parts = found["step_parts_seconds"]
    assert status == 0 and found["speeds"]["gpu"] == "NVIDIA H200" and found["speeds"]["all-to-all"] == "measured"
    assert parts["attention forward"] + parts["attention backward"] == pytest.approx(0.2) and parts["mlp"] == pytest.approx(0.2)
    assert parts["all-to-all"] > 0.1
    status, _, error = answer(tool, capsys, *job, "--calibrate", report_of(tmp_path / "r.json", "cpu"))
    assert status == 1 and "was rehearsed on a CPU; a rehearsal on a GPU works" in error
    exchanges.write_text(json.dumps(json.loads(exchanges.read_text()) | {"device": "cpu"}))
    status, _, error = answer(tool, capsys, *job, "--calibrate", str(exchanges))
    assert status == 1 and f"--calibrate {exchanges} was measured on CPUs" in error


def test_a_reader_that_is_gone_ends_it_quietly():
    command = [sys.executable, str(TOOL), *SMALL, "--gpus", "2", "--seq-length", "8192"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait(timeout=60) == -signal.SIGPIPE
    run.stderr.close()


def test_docstring_examples_are_true():
    assert doctest.testmod(capacity).failed == doctest.testmod(run_logs).failed == 0
