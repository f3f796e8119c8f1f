"""What is said of a run before it runs: how long a step may take, and so a collective, on devices known and unknown."""

from datetime import timedelta

import pytest
import torch

import pretrain_llama
from megacp.arguments import model_config_from_args, parse_args, validate_args
from megacp.parallel_state import ParallelLayout
from megacp.training.initialize import collective_timeout
from megacp.training.loop import device_peak_flops
from megacp.training.summary import predicted_step_seconds
from tests.test_pretrain import MODEL, records, run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EIGHT = "--model llama3-8b --context-parallel-size 8 --seq-length 131072 --mock-data"


def step_seconds(flags, ranks, peak, device):
    args = parse_args(flags.split())
    validate_args(args, ranks)
    layout = ParallelLayout(ranks, args.context_parallel_size)
    return predicted_step_seconds(args, model_config_from_args(args), layout, peak, device)


def test_a_step_of_an_unknown_gpu_takes_as_long_as_that_of_a_slow_one():
    known, unknown, cpu = (step_seconds(EIGHT, 8, *where) for where in ((989e12, GPU), (None, GPU), (None, CPU)))
    # 6 FLOPs per weight and token, and 12 per (query, key) pair, channel, head and layer.
    flops = 6 * 7.505e9 * 131072 + 12 * 32 * 32 * 128 * 131072**2 / 2
    assert known == pytest.approx(flops / 8 / (0.3 * 989e12), rel=1e-3)
    assert 3 < unknown / known < 30, "an H20, the slowest of its generation, has 148 TFLOP/s"
    assert cpu > 1000 * unknown
    assert collective_timeout(0, unknown) < timedelta(hours=1), "not a day"


@pytest.mark.parametrize("name, flops", [("NVIDIA GB200", None), ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", None)])
def test_the_peak_is_the_stated_one_or_that_of_the_name(name, flops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_flops(GPU, None) == flops
    assert device_peak_flops(GPU, 756.0) == 756e12
    assert device_peak_flops(CPU, None) is None and device_peak_flops(CPU, 0.1) == 1e11


def test_a_stated_peak_gives_an_mfu(tmp_path):
    log = tmp_path / "log"
    done = run([*MODEL, "--mock-data", "--train-iters", 3, "--log-jsonl", log, "--device-peak-tflops", 0.25])
    assert done.returncode == 0, done.stderr
    assert "MFU against 0.25 TFLOP/s, as --device-peak-tflops says" in done.stdout and "| MFU " in done.stdout
    for record in records(log):
        assert record["mfu"] == pytest.approx(record["tflops_per_gpu"] / 0.25)


@pytest.mark.parametrize("flags, said", [
    ("--save ckpt --save-interval 500", "checkpoint every 500 steps and at the end in ckpt, the last 2 kept (--ckpt-keep)"),
    ("--save ckpt --ckpt-keep 1", "checkpoint at the end in ckpt, the last one kept (--ckpt-keep)"),
    ("", None),
])  # fmt: skip
def test_that_older_checkpoints_are_deleted_is_said_before_the_first_is(flags, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pretrain_llama.py", *MODEL, "--mock-data", "--dry-run", *flags.split()])
    assert pretrain_llama.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint")]
    assert lines == ([said] if said else [])
