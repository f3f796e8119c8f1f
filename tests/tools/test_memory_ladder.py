"""The ladder's bars against hand counts and the planner; the picture is there and says what each bar is."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.memory.units import GIB
from megacp.planner import predict
from megacp.planning.host_states import host_state_bytes
from megacp.training.capacity import job_of, parse_planned

TOOL = Path(__file__).parents[2] / "tools" / "memory_ladder.py"
FLAGS = "--model llama-tiny --mlp-tile-size 1024 --loss-tile-size 1024 --seq-length 65536".split()


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("memory_ladder", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def job():
    return job_of(parse_planned(FLAGS, ""), 4, 65536)[1]


@pytest.fixture(scope="module")
def rungs(tool, job):
    return {rung.name: rung for rung in tool.ladder(job)}


def test_every_rung_takes_less_than_the_one_before(rungs):
    totals = [rung.total for rung in rungs.values()]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals) == 9
    assert [rung.how for rung in rungs.values()] == ["formula"] * 3 + ["counted"] * 6


def test_counted_bars_are_the_planners(tool, rungs, job):
    lean = predict(job, [PLANS["lean"]] * 4)
    assert rungs["+ saved attention, lean"].total == lean.device_bytes
    assert rungs["+ saved attention, lean"].host_bytes == lean.host_bytes
    away = LayerPlan(h=HOST, output=RECOMPUTE, lse=RECOMPUTE)
    assert rungs["+ UPipe"].total == predict(job, [away] * 4).device_bytes
    assert rungs["+ recompute"].parts["kept activations"] == 4 * job.unit  # h of each layer
    parts = rungs["+ saved attention, lean"].parts
    buffers = sum(parts.get(part, 0) for part in ("hidden states", "attention", "weight gradients", "tiles", "output head"))
    assert buffers == lean.parts["buffers"]
    assert set(parts) <= set(tool.COLORS), "a part without a colour is not drawn"


def test_states_leave_for_the_host_on_a_rung_of_their_own(tool, job, rungs):
    *before, last = tool.ladder(replace(job, states_on_host=True))
    assert before == list(rungs.values())
    assert last.name == "+ optimizer on the host" and last.parts["states"] == 0 < before[-1].parts["states"]
    assert last.host_bytes - before[-1].host_bytes == host_state_bytes(job.config, 4)


def test_the_baseline_by_hand(rungs, job):
    # d 256, 8 heads of 32 (H·D 256), 4 KV heads (K·D 128), F 768; 4 layers; 65,536 tokens
    kept = 4 * 65536 * 2 * (4 * 256 + 2 * 256 + 2 * 128 + 4 * 768)
    assert rungs["baseline"].parts["kept activations"] == rungs["+ FSDP"].parts["kept activations"] == kept
    assert rungs["+ Ulysses"].parts["kept activations"] == kept // 4
    assert rungs["baseline"].parts["states"] == 12 * job.config.parameter_count() == 4 * rungs["+ FSDP"].parts["states"]
    assert rungs["baseline"].parts["output head"] == 65536 * 4096 * 10


def test_one_command_makes_table_and_picture(tool, tmp_path, monkeypatch, capsys, rungs):
    figures = []
    monkeypatch.setattr(tool.plt, "close", figures.append)
    output = tmp_path / "a folder" / "ladder.png"
    assert tool.main([*FLAGS, "--gpus", "4", "--gpu-memory-gib", "0.5", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[:10]}) == 1  # aligned
    for line, rung in zip(lines[1:10], rungs.values(), strict=True):
        assert line.startswith(rung.name) and f" {rung.how} " in line and f"{rung.total / GIB:.1f}" in line
    pixels = matplotlib.image.imread(output)
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1200
    left, right = figures[0].axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == [f"{rung.name}\n({rung.how})" for rung in rungs.values()]
    assert any("on the host" in text.get_text() for text in right.texts)
    assert "measured" not in " ".join(lines)


def test_errors_name_the_flag(tool, capsys, tmp_path):
    assert tool.main(["--model", "llama-tiny", "--gpus", "2"]) == 1
    assert "--seq-length is missing; --seq-length 1048576 works" in capsys.readouterr().err
    assert tool.main([*FLAGS, "--gpus", "6", "--context-parallel-size", "3"]) == 1
    assert "--context-parallel-size 3 does not divide" in capsys.readouterr().err
