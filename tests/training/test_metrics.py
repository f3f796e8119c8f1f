"""Throughput that is counted wrongly misleads every decision; a log with doubled or lost steps misleads every plot."""

import dataclasses
import doctest
import io
import json
import math
import os
import re

import pytest
import torch

import megacp.training.metrics
from megacp.model.config import preset
from megacp.training.metrics import (
    MetricsLogger,
    StepRecord,
    attention_flops,
    causal_pairs,
    convention_text,
    drop_steps_from,
    duration_text,
    model_flops_per_step,
    peak_flops,
)
from megacp.training.position_loss import EvaluationRecord

ISSUE_KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu",
    "mfu", "peak_memory_gib",
]  # fmt: skip


def record(step, **changes):
    measured = dict(
        step=step, loss=3.5, grad_norm=1.25, lr=3e-4, tokens=8192, valid_tokens=8000, step_time_s=2.0,
        model_flops=4 * 10**12, world_size=4, peak=1e12, peak_memory_bytes=3 * 2**29,
    )  # fmt: skip
    return StepRecord.measured(**measured | changes)


# ---------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("lengths", [[1], [7], [3, 5], [1, 1, 6, 4]])
def test_causal_pairs_are_the_entries_of_the_mask(lengths):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    mask = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert causal_pairs(borders) == mask.sum().item()


def test_pairs_are_exact_beyond_64_bits():
    n = 2**40 + 1
    assert causal_pairs((0, n)) == n * (n + 1) // 2


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-8b"])
def test_forward_flops_are_what_torch_counts_in_the_hugging_face_model(name):
    """torch counts every matmul of the model, attention over the full square; ours is the causal part of it."""
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    shape = dict(num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2, kv_channels=16)
    config = dataclasses.replace(preset(name), vocab_size=200, **shape)
    tokens = 96
    family = transformers.Qwen3Config if config.qk_layernorm else transformers.LlamaConfig
    theirs = family(
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab_size=config.vocab_size,
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    square = 4 * config.num_layers * config.num_attention_heads * config.kv_channels * tokens**2
    causal = attention_flops(config, causal_pairs((0, tokens)))
    assert causal == square * (tokens + 1) // (2 * tokens)
    extra = counter.get_total_flops() - square + causal - model_flops_per_step(config, tokens, causal_pairs((0, tokens))) // 3
    assert extra in (0, tokens * config.kv_channels)  # some versions make the rotary angles by a matmul


def test_flops_add_up_over_streams_and_shrink_with_documents():
    config = preset("llama3-8b")
    whole_pairs, half_pairs = causal_pairs((0, 4096)), causal_pairs((0, 2048, 4096))
    whole, halves = model_flops_per_step(config, 4096, whole_pairs), model_flops_per_step(config, 4096, half_pairs)
    assert model_flops_per_step(config, 8192, whole_pairs + half_pairs) == whole + halves
    assert whole - halves == 3 * 4 * 32 * 128 * 32 * 2048 * 2048  # the square below the diagonal that no longer counts


def test_peaks_are_of_the_cards_that_reach_them():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA B200") == 2250e12
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GB200", "Tesla T4", "cpu"):
        assert peak_flops(other) is None, other


def test_the_convention_is_said_with_and_without_a_peak():
    assert "causal, per document" in convention_text(989e12) and "989 TFLOP/s" in convention_text(989e12)
    assert "no MFU" in convention_text(None) and "--device-peak-tflops" in convention_text(None)
    assert "MFU against 2,250 TFLOP/s, the device's" in convention_text(2250e12)
    assert convention_text(362.5e12, stated=True).endswith("MFU against 362.5 TFLOP/s, as --device-peak-tflops says")


# --------------------------------------------------------------------------------------------------------------- records


def test_a_record_has_the_promised_keys_and_units():
    values = json.loads(record(7).to_json({}))
    assert list(values) == ISSUE_KEYS
    assert values["tokens_per_s_per_gpu"] == 8192 / 2 / 4
    assert values["tflops_per_gpu"] == 0.5
    assert values["mfu"] == 0.5
    assert values["peak_memory_gib"] == 1.5


def test_what_is_unknown_or_not_finite_is_null():
    values = json.loads(record(7, peak=None, peak_memory_bytes=None, grad_norm=math.inf, loss=math.nan).to_json({}))
    assert [key for key, value in values.items() if value is None] == ["loss", "grad_norm", "mfu", "peak_memory_gib"]


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def log_steps(path, first, last, **options):
    stream = io.StringIO()
    with MetricsLogger(10, first_step=first, jsonl=str(path), stream=stream, **options) as logger:
        for step in range(first, last + 1):
            logger.log(record(step))
    return stream.getvalue()


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    logger = MetricsLogger(10, jsonl=str(tmp_path / "logs" / "run.jsonl"), stream=io.StringIO())
    logger.log(record(1))
    assert steps_of(tmp_path / "logs" / "run.jsonl") == [1]
    logger.close()


def test_no_step_is_there_twice_after_resuming_twice(tmp_path):
    path = tmp_path / "run.jsonl"
    log_steps(path, 1, 6)
    log_steps(path, 5, 8)  # the checkpoint was of step 4
    with path.open("a") as file:
        file.write('{"step": 9, "loss": 3')  # killed while writing
    log_steps(path, 9, 10)
    assert steps_of(path) == list(range(1, 11))
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def log_evaluations(path, first, steps, part="valid"):
    with MetricsLogger(10, first_step=first, jsonl=str(path), stream=io.StringIO()) as logger:
        for step in steps:
            logger.log_evaluation(EvaluationRecord(step, part, ("0-32K",), (2.5,), (3,), 2.5, 0.25))


def test_a_run_from_the_start_moves_the_logs_of_former_ones_aside_and_says_so(tmp_path):
    path = tmp_path / "run.jsonl"
    assert "moved" not in log_steps(path, 1, 6)
    log_evaluations(path, 7, [3, 6])
    (tmp_path / "run.test.jsonl.1").write_text("taken\n")  # so 1 is no number for any of the three
    with path.open("a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    before = {name: (tmp_path / name).read_text() for name in ("run.jsonl", "run.valid.jsonl")}

    moved = f"--log-jsonl {path}: of a former run, so moved aside: {path}.2, {tmp_path}/run.valid.jsonl.2\n"
    assert log_steps(path, 1, 3).startswith(moved)
    assert steps_of(path) == [1, 2, 3] and not (tmp_path / "run.valid.jsonl").exists()
    log_steps(path, 1, 2)
    assert steps_of(path) == [1, 2] and steps_of(tmp_path / "run.jsonl.3") == [1, 2, 3]
    assert {name: (tmp_path / f"{name}.2").read_text() for name in before} == before
    assert (tmp_path / "run.test.jsonl.1").read_text() == "taken\n"


def test_a_resumed_run_moves_nothing_and_a_file_that_holds_nothing_stays(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("")
    assert "moved" not in log_steps(path, 1, 6)
    log_evaluations(path, 7, [2, 4, 6])
    assert "moved" not in log_steps(path, 5, 7)
    assert steps_of(path) == list(range(1, 8)) and steps_of(tmp_path / "run.valid.jsonl") == [2, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_branches_off_another_keeps_a_copy_of_what_it_takes_again(tmp_path):
    path = tmp_path / "run.jsonl"
    log_steps(path, 1, 6)
    log_evaluations(path, 7, [2, 6])
    before = path.read_text()
    kept = f"--log-jsonl {path}: of a former run, so kept aside, as this run takes some of its steps again: {path}.1, "
    assert log_steps(path, 4, 5, branches=True).startswith(kept)
    assert steps_of(path) == [1, 2, 3, 4, 5] and (tmp_path / "run.jsonl.1").read_text() == before
    assert steps_of(tmp_path / "run.valid.jsonl") == [2] and steps_of(tmp_path / "run.valid.jsonl.1") == [2, 6]
    assert "aside" not in log_steps(path, 6, 7, branches=True), "nothing to lose"
    assert "aside" not in log_steps(path, 6, 7), "its own steps"


def test_nothing_is_moved_when_one_of_the_files_is_no_log(tmp_path):
    log_steps(tmp_path / "run.jsonl", 1, 2)
    (tmp_path / "run.test.jsonl").write_text("# Notes\n")
    with pytest.raises(ValueError, match="run.test.jsonl: line 1 is not a step record"):
        log_steps(tmp_path / "run.jsonl", 1, 2)
    assert steps_of(tmp_path / "run.jsonl") == [1, 2] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["# Notes\n", '{"loss": 1.0}\n', "[1]\n", "notes without an end of line", '{"step": 1}\nx\n'])
def test_a_file_that_is_no_log_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="--log-jsonl .*notes.md: line"):
        MetricsLogger(10, jsonl=str(path))
    assert path.read_text() == text


def test_a_full_disk_leaves_the_old_log_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    log_steps(path, 1, 6)
    before = path.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(megacp.training.metrics.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        drop_steps_from(path, 3)
    assert path.read_text() == before


def test_a_disk_that_fills_up_ends_the_log_and_not_the_run(tmp_path, monkeypatch):
    path, stream = tmp_path / "run.jsonl", io.StringIO()
    with MetricsLogger(10, jsonl=str(path), tensorboard_dir=str(tmp_path / "tb"), stream=stream) as logger:
        logger.log(record(1))

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        os.dup2(os.open("/dev/full", os.O_WRONLY), logger._jsonl.fileno())
        monkeypatch.setattr(logger._tensorboard, "add_scalar", full)
        for step in (2, 3):
            logger.log(record(step))
    text = stream.getvalue()
    assert re.findall(r"step +(\d+)/", text) == ["1", "2", "3"]
    for flag in ("--log-jsonl", "--tensorboard-dir"):
        assert len(re.findall(f"warning: {flag}: .*No space left on device at step 2: this log ends here", text)) == 1
    assert steps_of(path) == [1]


@pytest.mark.parametrize("flag, option", [("--log-jsonl", "jsonl"), ("--tensorboard-dir", "tensorboard_dir")])
def test_a_log_that_cannot_be_begun_is_refused_by_its_flag(tmp_path, flag, option):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"{flag} .*file/x cannot be begun .*leave the flag out"):
        MetricsLogger(10, **{option: str(tmp_path / "file" / "x")})


# --------------------------------------------------------------------------------------------------------------- console


def test_console_lines_are_aligned_and_carry_units():
    stream = io.StringIO()
    logger = MetricsLogger(1000, stream=stream)
    rows = [(1, 11.76, 1234.5, 812.25, 137.5), (10, 3.4, 0.5, 2.0, 21.25), (1000, 0.02, 10.0, 60.0, 5)]
    for step, loss, norm, time_s, memory in rows:
        logger.log(record(step, loss=loss, grad_norm=norm, step_time_s=time_s, peak_memory_bytes=int(memory * 2**30)))
    lines = stream.getvalue().splitlines()
    assert len({tuple(m.start() for m in re.finditer(r"\|", line)) for line in lines}) == 1, "\n".join(lines)
    for part in ("step   10/1000", "loss   3.4000", "grad norm    0.500", "lr 3.00e-04", "1,024 tokens/s/GPU", "0.5 TFLOP/s/GPU",
                 "MFU 50.0%", "2.000 s/step", "peak  21.25 GiB", "ETA"):  # fmt: skip
        assert part in lines[1], lines[1]


def test_a_cpu_run_does_not_speak_of_gpus(tmp_path):
    text = log_steps(tmp_path / "run.jsonl", 1, 1, device_type="cpu")
    assert "tokens/s/rank" in text and "GPU" not in text


def test_log_interval_thins_the_console_but_not_the_file(tmp_path):
    text = log_steps(tmp_path / "run.jsonl", 2, 10, log_interval=4)
    assert re.findall(r"step +(\d+)/", text) == ["2", "4", "8", "10"]
    assert steps_of(tmp_path / "run.jsonl") == list(range(2, 11))


def test_the_eta_is_not_misled_by_a_slow_first_step():
    stream = io.StringIO()
    logger = MetricsLogger(103, stream=stream)
    for step, time_s in [(1, 500.0), (2, 3.0), (3, 3.0)]:
        logger.log(record(step, step_time_s=time_s))
    etas = [line.split("ETA")[1].strip() for line in stream.getvalue().splitlines()]
    assert etas[1:] == ["0:05:03", "0:05:00"]


def test_durations():
    assert duration_text(42.4) == " 0:00:42"
    assert duration_text(12 * 3600 + 180) == "12:03:00"
    assert duration_text(3 * 86400 + 4 * 3600) == "3d 04:00:00"


# ----------------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, last in [(1, 6), (5, 8)]:
        log_steps(tmp_path / "run.jsonl", first, last, tensorboard_dir=str(tmp_path / "events"))
    events = event_accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(ISSUE_KEYS) - {"step"}
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert events.Scalars("peak_memory_gib")[0].value == 1.5


def test_tensorboard_shows_the_memory_of_each_phase(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLogger(1, tensorboard_dir=str(tmp_path), stream=io.StringIO()) as logger:
        logger.log(record(1, phase_memory_bytes={"head": 2**30, "layer backward": 3 * 2**30}))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [events.Scalars(f"phase_memory_gib/{phase}")[0].value for phase in ("head", "layer backward")] == [1.0, 3.0]


def test_docstring_examples_are_true():
    assert doctest.testmod(megacp.training.metrics).failed == 0
