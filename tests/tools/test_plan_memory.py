"""Answers of the planning tool against the planner asked step by step."""

import argparse
import doctest
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megacp.training.capacity as capacity
from megacp.memory.policy import PLANS
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.planner import predict
from megacp.training.activation_plans import activation_plans
from megacp.training import run_logs
from megacp.training.metrics import model_flops_per_step
from megacp.training.rehearsals import job_settings
from megacp.training.run_logs import log_head
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


def test_docstring_examples_are_true():
    assert doctest.testmod(capacity).failed == doctest.testmod(run_logs).failed == 0


def log_of(path, seconds, tokens=8192, peak=None, pairs=(), ranks=2, head=None):
    """The log of a run of that job; `pairs` of each step, else of one document."""
    job = capacity.job_of(planned("--activation-memory", "gpu"), 2, 8192)[1]
    records = []
    for n, s in enumerate(seconds, 1):
        flops = model_flops_per_step(job.config, tokens, pairs[n - 1] if pairs else PAIRS)
        records.append({"step": n, "tokens": tokens, "step_time_s": s, "tokens_per_s_per_gpu": tokens / s / ranks,
                        "tflops_per_gpu": flops / s / ranks / 1e12, "peak_memory_gib": peak} | (head or {} if n == 1 else {}))  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def steps_of(*seconds, pairs=(), profiled=()):
    """What a report says of its steps."""
    return [{"step": n, "seconds": s, "attention_pairs": pairs[n - 1] if pairs else PAIRS, "profiled": n in profiled}
            for n, s in enumerate(seconds, 1)]  # fmt: skip


def head_of(device="NVIDIA H200", profiled=(), **changes):
    """What the log says of the job that `report_of` reports."""
    job = capacity.job_of(planned("--activation-memory", "gpu"), 2, 8192)[1]
    args = argparse.Namespace(profile=bool(profiled), profile_step_start=min(profiled, default=0),
                              profile_step_end=max(profiled, default=0) + 1, train_iters=100)  # fmt: skip
    job = replace(job, dtype=torch.bfloat16)
    head = log_head(job, [PLANS["gpu"]] * 3, 1, device, args)
    return head | {"job": head["job"] | changes}


def compared(tool, capsys, report, log, *flags):
    assert tool.main(["--rehearsal", report, "--measured", log, *flags, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    step, speed, memory = found["rows"].values()
    for name in ("measured", "rehearsed", "predicted"):
        assert step[name] is None or step[name] * speed[name] == pytest.approx(4096), "one line says what the other does"
    return found, step, memory


def refused(tool, capsys, *flags):
    assert tool.main(list(flags)) == 1
    return capsys.readouterr().err


def test_a_real_run_against_its_rehearsal_and_prediction(tool, capsys, tmp_path):
    report = report_of(tmp_path / "r.json", "NVIDIA H200", steps=steps_of(7.0, 0.9, 1.0))
    peak = json.loads(Path(report).read_text())["peak"] / GIB
    log = log_of(tmp_path / "run.jsonl", [9.0, 1.0, 1.5, 1.25], peak=peak / 1.02, head=head_of())
    found, step, memory = compared(tool, capsys, report, log, "--calibrate", report)
    assert found["measured_steps"] == found["rehearsed_steps"] == [2, 3]
    assert step["measured"] == 1.25 and step["rehearsed"] == 0.95 and step["rehearsed_off"] == pytest.approx(0.95 / 1.25 - 1)
    assert memory["rehearsed_off"] == pytest.approx(0.02) and memory["predicted_off"] == pytest.approx(0.96 * 1.02 - 1, abs=1e-3)
    assert tool.main(["--rehearsal", report, "--measured", log, "--calibrate", report]) == 0
    text = capsys.readouterr().out
    lines = {line[:12].strip(): line for line in text.splitlines()}
    assert "-24.0% !" in lines["step s"] and "+2.0%  " in lines["peak GiB"] and "steps 2-3 of both, the same documents" in text
    assert "cannot be checked" not in text


DOCUMENTS = [PAIRS // 2, PAIRS // 5, PAIRS // 9, PAIRS // 3, PAIRS // 4]  # pairs of packed steps


def seconds_of(pairs):
    """A GPU that computes as in the report: 0.8 s, and 0.2 s of attention for the documents of its last step, DOCUMENTS[2]."""
    return 0.8 + 0.2 * pairs / DOCUMENTS[2]


def test_packed_steps_are_compared_with_their_like(tool, capsys, tmp_path):
    measured = [9.0, *map(seconds_of, DOCUMENTS[1:])]
    log = log_of(tmp_path / "run.jsonl", [s / 0.96 for s in measured], pairs=DOCUMENTS, head=head_of())
    report = report_of(tmp_path / "r.json", "NVIDIA H200", steps=steps_of(*measured[:3], pairs=DOCUMENTS[:3]))
    report = changed(report, lambda r: r["settings"].update(attention_pairs=DOCUMENTS[2]))
    found, step, _ = compared(tool, capsys, report, log)
    assert found["measured_steps"] == found["rehearsed_steps"] == [2, 3] and step["rehearsed_off"] == pytest.approx(-0.04)
    other_data = [PAIRS // 7] * 5
    log = log_of(tmp_path / "other.jsonl", [9.0, *map(seconds_of, other_data[1:])], pairs=other_data, head=head_of())
    for steps in (json.loads(Path(report).read_text())["steps"], None):  # None: a report of before
        report = changed(report, lambda r: r.update(steps=steps) if steps else r.pop("steps"))
        found, step, _ = compared(tool, capsys, report, log)
        assert found["measured_steps"] == [2, 3, 4, 5] and step["rehearsed_off"] == pytest.approx(0)
        assert "its attention scaled to their documents" in found["compared"]


def test_a_prediction_is_of_the_measured_documents(tool, capsys, tmp_path):
    report = report_of(tmp_path / "r.json", "NVIDIA H200", steps=steps_of(9.0, 1.0, pairs=DOCUMENTS[:2]))
    report = changed(report, lambda r: r["settings"].update(attention_pairs=DOCUMENTS[1]))
    times = [compared(tool, capsys, report, log_of(tmp_path / "log", [9.0, 1.0], pairs=[PAIRS, pairs]), "--calibrate", report)[1]["predicted"]
             for pairs in (DOCUMENTS[1], 2 * DOCUMENTS[1])]  # fmt: skip
    assert times[1] - times[0] == pytest.approx(0.2), "the attention that the rehearsal measured, once more"


def changed(path, change):
    report = json.loads(Path(path).read_text())
    change(report)
    Path(path).write_text(json.dumps(report))
    return path


@pytest.mark.parametrize(
    "profiled, rehearsed, counted, said",
    [
        ((), 5, [2, 3, 4, 5], "same documents"),
        ((5,), 5, [2, 3], "same documents"),  # in step 4 the profiler warms up
        ((3,), 3, [4, 5], "step 3 rehearsed (profiled, which is slower)"),
        ((), 1, [2, 3, 4, 5], "step 1 rehearsed (the first, which compiles"),
        ((2, 3, 4, 5), 5, [2, 3, 4, 5], "same documents (profiled, which is slower)"),
    ],
)
def test_cold_and_profiled_steps_count_only_where_there_are_no_others(tool, capsys, tmp_path, profiled, rehearsed, counted, said):
    report = report_of(tmp_path / "r.json", "NVIDIA H200", steps=steps_of(*[1.0] * rehearsed, profiled=profiled))
    log = log_of(tmp_path / "log", [1.0] * 5, head=head_of(profiled=profiled))
    found, _, _ = compared(tool, capsys, report, log)
    assert found["measured_steps"] == counted and said in found["compared"]


def test_what_a_cpu_or_a_stub_does_not_tell_is_left_open(tool, capsys, tmp_path):
    log = log_of(tmp_path / "run.jsonl", [2.0])
    for report in (report_of(tmp_path / "cpu.json", "cpu"), report_of(tmp_path / "stub.json", "NVIDIA H200", attention="stub-fa4")):
        found, step, memory = compared(tool, capsys, report, log)
        assert memory["rehearsed_off"] is None and step["measured"] == 2.0
        assert (step["predicted"] is None) == (Path(report).stem == "cpu")
        assert (step["rehearsed"] is None) == (Path(report).stem == "stub")
        assert any("does not tell of its job" in note for note in found["notes"])
        assert tool.main(["--rehearsal", report, "--measured", log]) == 0 and " - " in capsys.readouterr().out


def test_logs_and_rehearsals_that_do_not_belong_together_are_refused(tool, capsys, tmp_path):
    report, log = report_of(tmp_path / "r.json", "cpu"), log_of(tmp_path / "run.jsonl", [1.0], tokens=4096)
    for flags, said in (
        (["--rehearsal", report, "--measured", log], "with tokens 4096, --rehearsal"),
        (["--rehearsal", report, report, "--measured", log], "1 logs for 2 of --rehearsal; as many work"),
        (["--measured", log], "1 logs for 0 of --rehearsal"),
        (["--rehearsal", report, "--measured", report], "line 1 has no 'step', so it is no step"),
        (["--rehearsal", report, "--measured", str(tmp_path / "none")], "cannot be read"),
        (["--rehearsal", report, "--seq-length", "4096"], "--seq-length 4096: a --rehearsal is compared by its own settings"),
    ):
        assert said in refused(tool, capsys, *flags)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(head=head_of(upipe_heads_per_stage=8)), "upipe_heads_per_stage 8, --rehearsal"),
        (dict(head=head_of(plans=[{"h": "host"}] * 3)), "plans[0].h host"),
        (dict(head=head_of(ranks=4)), "ranks 4"),
        (dict(head=head_of("NVIDIA H100 80GB HBM3")), "device NVIDIA H100 80GB HBM3"),
        (dict(head=head_of(model=head_of()["job"]["model"] | {"num_layers": 4})), "model.num_layers 4"),
        (dict(ranks=4), "ranks 4"),
        (dict(pairs=[2 * PAIRS] * 2), "steps of other FLOPs than llama-tiny"),
    ],
)
def test_a_log_of_another_job_is_refused_by_the_setting(tool, capsys, tmp_path, change, said):
    report, log = report_of(tmp_path / "r.json", "NVIDIA H200"), log_of(tmp_path / "run.jsonl", [1.0, 1.0], **change)
    error = refused(tool, capsys, "--rehearsal", report, "--measured", log)
    assert said in error and report in error and log in error and "of the same flags work" in error


def test_speeds_of_a_gpu_are_not_held_against_a_cpu_or_another_gpu(tool, capsys, tmp_path):
    cpu, gpu = report_of(tmp_path / "cpu.json", "cpu"), report_of(tmp_path / "gpu.json", "NVIDIA H200")
    log = log_of(tmp_path / "run.jsonl", [1.0, 1.0])
    for flags in (["--calibrate", gpu], ["--gpu", "H200"]):
        error = refused(tool, capsys, "--rehearsal", cpu, "--measured", log, *flags)
        assert f"--rehearsal {cpu} was rehearsed on a CPU, and {' '.join(flags)} tells the speeds of GPUs" in error
    assert "--gpu B200 is not what" in refused(tool, capsys, "--rehearsal", gpu, "--measured", log, "--gpu", "B200")


def test_measured_links_name_their_gpus(tool, capsys, tmp_path):
    links = tmp_path / "a2a.json"
    links.write_text(json.dumps({"device": "NVIDIA H200", "all_to_all": [{"bytes_per_rank": 2**20, "seconds": 0.01, "gpus": 8}]}))
    job = [*SMALL, "--seq-length", "8192", "--gpu", "H200", "--calibrate", str(links)]
    assert tool.main([*job, "--gpus", "8"]) == 0 and "all-to-all measured with 8 GPUs\n" in capsys.readouterr().out
    assert tool.main([*job, "--gpus", "2"]) == 0
    assert "all-to-all measured with 8 GPUs, not with the 2 of this job\n" in capsys.readouterr().out
    job[job.index("H200")] = "B200"
    assert f"--calibrate {links} was measured on NVIDIA H200, not on B200; --gpu H200 works" in refused(tool, capsys, *job, "--gpus", "8")


def test_numbers_that_no_clock_gives_are_refused_by_name(tool, capsys, tmp_path):
    log, job = log_of(tmp_path / "run.jsonl", [1.0, 1.0]), [*SMALL, "--gpus", "2", "--seq-length", "8192"]
    lines = Path(log).read_text().splitlines()
    for bad in ("NaN", "Infinity", "-1.0", "1e999", "null", "0"):
        for name in ("step_seconds", "peak", "copy_bytes_per_s"):
            report = report_of(tmp_path / "r.json", "NVIDIA H200", **{name: "BAD"})
            Path(report).write_text(Path(report).read_text().replace('"BAD"', bad))
            if (name, bad) != ("copy_bytes_per_s", "null"):  # a CPU's
                for flags in ([*job, "--calibrate", report], ["--rehearsal", report], ["--rehearsal", report, "--measured", log]):
                    error = refused(tool, capsys, *flags)
                    assert report in error and f"{name} is " in error, error
        links = tmp_path / "a2a.json"
        links.write_text('{"all_to_all": [{"bytes_per_rank": 1048576, "seconds": %s, "gpus": 8}]}' % bad)
        error = refused(tool, capsys, *job, "--calibrate", str(links))
        assert str(links) in error and "seconds is " in error, error
        report = report_of(tmp_path / "r.json", "NVIDIA H200")
        for name in ("step_time_s", "tflops_per_gpu", "tokens", "step"):
            Path(log).write_text(f"{lines[0]}\n" + re.sub(rf'"{name}": [^,]+', f'"{name}": {bad}', lines[1]) + "\n")
            error = refused(tool, capsys, "--rehearsal", report, "--measured", log)
            assert f"{log}: line 2" in error and f"{name} is " in error, error


def test_logs_that_are_cut_or_broken(tool, capsys, tmp_path):
    report, log = report_of(tmp_path / "r.json", "NVIDIA H200"), log_of(tmp_path / "run.jsonl", [9.0, 1.0, 2.0], head=head_of())
    first, second, third = Path(log).read_text().splitlines(keepends=True)
    for cut in (third[:1], third[:40], third[:-3]):
        Path(log).write_text(first + second + cut)
        found, step, _ = compared(tool, capsys, report, log)
        assert step["measured"] == 1.0 and found["notes"][0] == f"{log}: line 3 is cut off, as when a run is killed, and left out"
    other = json.dumps(json.loads(third) | head_of(upipe_heads_per_stage=8)) + "\n"
    for text, said in (
        ("", "holds no step"),
        (first[:50], "holds no step"),
        (first + second[:40] + "\n" + third, "line 2 is no record of a step (not JSON"),
        (first + "\n" + third, "line 2 is no record of a step (not JSON"),
        (first + "[1]\n", "line 2 is no record of a step (a list, not an object)"),
        (first + '{"step": 2, "loss": 1.0}\n', "line 2 has no 'tokens', so it is no step"),
        (first + third.replace("8192,", "4096,") + "", "line 2: step 3 is of 4,096 tokens, step 1 of 8,192: more than one job"),
        (first + third + second, "line 3: step 2 after step 3: more than one run"),
        (first + second + other, "line 3: from step 3 on upipe_heads_per_stage is 8, before it was"),
        (second + other, "line 2: step 3 tells of its job and those before it do not"),
    ):
        Path(log).write_text(text)
        error = refused(tool, capsys, "--rehearsal", report, "--measured", log)
        assert f"--measured {log}" in error and said in error, error
    Path(log).write_bytes(b"\xff\xfe")
    assert f"--measured {log} is no text" in refused(tool, capsys, "--rehearsal", report, "--measured", log)
