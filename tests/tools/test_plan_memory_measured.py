"""Real runs against their rehearsals and predictions: steps that are alike, and files that do not belong together or are broken."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megacp.training.capacity as capacity
from megacp.memory.policy import PLANS
from megacp.memory.units import GIB
from megacp.training.metrics import model_flops_per_step
from megacp.training.run_logs import log_head
from tests.tools.loading import load_tool
from tests.tools.test_plan_memory import PAIRS, SMALL, TOOL, planned, report_of


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def log_of(path, seconds, tokens=8192, peak=None, pairs=(), ranks=2, head=None):
    """The log of a run of that job; `pairs` of each step, else of one document."""
    job = capacity.job_of(planned("--activation-memory", "gpu"), 2, 8192)[1]
    records = []
    for n, s in enumerate(seconds, 1):
        flops = model_flops_per_step(job.config, tokens, pairs[n - 1] if pairs else PAIRS)
        record = {"step": n, "tokens": tokens, "step_time_s": s, "tokens_per_s_per_gpu": tokens / s / ranks,
                  "tflops_per_gpu": flops / s / ranks / 1e12, "peak_memory_gib": peak}  # fmt: skip
        records.append(record | (head or {} if n == 1 else {}))
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
    times = []
    for pairs in (DOCUMENTS[1], 2 * DOCUMENTS[1]):
        log = log_of(tmp_path / "log", [9.0, 1.0], pairs=[PAIRS, pairs])
        times.append(compared(tool, capsys, report, log, "--calibrate", report)[1]["predicted"])
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
        assert f"--rehearsal {cpu} was rehearsed on a CPU, and {' '.join(flags)} tells the speeds of other GPUs" in error
    assert "--gpu B200 is not what" in refused(tool, capsys, "--rehearsal", gpu, "--measured", log, "--gpu", "B200")


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA H100 PCIe"])
def test_a_gpu_whose_speeds_are_not_known_is_compared_in_memory(tool, capsys, tmp_path, device):
    report, log = report_of(tmp_path / "r.json", device), log_of(tmp_path / "run.jsonl", [1.0, 1.0], head=head_of(device))
    assert tool.main(["--rehearsal", report, "--measured", log]) == 0
    assert " - " in capsys.readouterr().out, "no predicted time"
    error = refused(tool, capsys, "--rehearsal", report, "--measured", log, "--gpu", "A100")
    assert f"was rehearsed on {device}, whose speeds are not known, and --gpu A100 tells the speeds of other GPUs" in error


def test_measured_links_name_their_gpus(tool, capsys, tmp_path):
    links = tmp_path / "a2a.json"
    links.write_text(json.dumps({"device": "NVIDIA H200", "all_to_all": [{"bytes_per_rank": 2**20, "seconds": 0.01, "gpus": 8}]}))
    job = [*SMALL, "--seq-length", "8192", "--gpu", "H200", "--calibrate", str(links)]
    assert tool.main([*job, "--gpus", "8"]) == 0 and "all-to-all measured with 8 GPUs\n" in capsys.readouterr().out
    assert tool.main([*job, "--gpus", "2"]) == 0
    assert "all-to-all measured with 8 GPUs, not with the 2 of this job\n" in capsys.readouterr().out
    job[job.index("H200")] = "B200"
    error = refused(tool, capsys, *job, "--gpus", "8")
    assert f"--calibrate {links} was measured on NVIDIA H200, not on B200; --gpu H200 works" in error


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
