"""Rungs measured on a CPU: few layers stand for all, flags are the rung's, and a rehearsal that fails says why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacp.arguments import parse_args
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import PLANS, plan_of
from megacp.model.config import preset
from megacp.planner import Job, predict_phases
from megacp.planning.ladder import ladder
from megacp.training.capacity import job_of, parse_planned
from megacp.training.ladder_rehearsals import LadderRehearsals, NotMeasured, bytes_in

FLAGS = "--model llama-tiny --vocab-size 512 --mlp-tile-size 512 --loss-tile-size 512 --upipe-query-chunk 512".split()
TOKENS, SECONDS = 4096, 60


@pytest.fixture(scope="module")
def rungs():
    job = job_of(parse_planned([*FLAGS, "--optimizer-cpu-offload"], ""), 4, TOKENS)[1]
    return {rung.name: rung for rung in ladder(job)}


def rehearsals(folder: Path, layers: int = 2, *flags: str, resume: bool = False) -> LadderRehearsals:
    return LadderRehearsals([*FLAGS, *flags], 4, TOKENS, "cpu", layers, folder, resume)


def test_two_layers_stand_for_four(rungs, tmp_path):
    rung = rungs["+ recompute"]  # h of each layer is kept on the device
    two = rehearsals(tmp_path / "2").measure(rung, SECONDS)
    four = rehearsals(tmp_path / "4", 99).measure(rung, SECONDS)
    assert (two.layers, four.layers) == (2, 4)
    assert four.bytes == json.loads(Path(four.report).read_text())["peak"]  # nothing added
    assert two.bytes == pytest.approx(four.bytes, rel=1e-3)
    assert two.phase == four.phase and two.predicted == four.predicted == rung.total
    assert json.loads(Path(two.report).read_text())["peak"] < 0.97 * two.bytes


def test_the_flags_are_those_of_the_rung(rungs, tmp_path):
    def parsed(name, *flags):
        command = rehearsals(tmp_path, 2, *flags).command(rungs[name].job, rungs[name].plan, tmp_path / "r.json")
        assert command[1].endswith("pretrain_llama.py") and Path(command[1]).exists()
        return parse_args(command[2:])

    recompute = parsed("+ recompute", "--optimizer-cpu-offload", "--fp32")
    assert (recompute.activation_memory, recompute.recompute_granularity) == ("gpu", "full")
    assert recompute.mlp_tile_size == recompute.loss_tile_size == TOKENS // 4 and recompute.upipe_heads_per_stage == 8
    assert recompute.upipe_query_chunk is None and not recompute.optimizer_cpu_offload
    assert recompute.bf16 and not recompute.fp32 and recompute.mock_data
    upipe = parsed("+ UPipe", "--train-data-path", "corpus")
    assert plan_of(upipe.activation_memory, upipe.recompute_granularity) == rungs["+ UPipe"].plan
    assert upipe.upipe_heads_per_stage == 4 and upipe.mlp_tile_size == 512 and not upipe.mock_data
    last = parsed("+ optimizer on the host")
    assert last.optimizer_cpu_offload and last.upipe_query_chunk == 512 and last.activation_memory == "lean"


def test_what_is_not_measured_says_why(rungs, tmp_path):
    def reason(name, *flags, seconds=SECONDS):
        with pytest.raises(NotMeasured) as raised:
            rehearsals(tmp_path, 2, *flags).measure(rungs[name], seconds)
        return str(raised.value)

    assert reason("+ Ulysses") == "megacp has no such code"
    assert "the host's memory is the device's" in reason("+ optimizer on the host")
    assert reason("+ UPipe", seconds=0.2) == "not done after 0.2 s"
    assert reason("+ UPipe", "--save", "x").startswith("--rehearse-world-size 4 rehearses a few steps and keeps nothing, so --save")
    assert not (tmp_path / "upipe.json").exists() and (tmp_path / "upipe.log").exists()


def test_a_report_is_taken_for_its_own_job_alone(rungs, tmp_path):
    rung = rungs["+ query chunks"]
    measured = rehearsals(tmp_path).measure(rung, SECONDS)
    assert rehearsals(tmp_path, resume=True).measure(rung, 0.01) == measured  # no time to measure it again
    without = replace(rehearsals(tmp_path, 4, resume=True), device=None)
    assert without.measure(rung, SECONDS).bytes == measured.bytes
    with pytest.raises(NotMeasured, match="has no report of it"):
        without.measure(rungs["+ UPipe"], SECONDS)
    with pytest.raises(NotMeasured, match=r"another job, llama-tiny, 4,096 tokens on 4 GPUs in bfloat16 \(other loss tile size\)"):
        without.measure(replace(rung, job=replace(rung.job, loss_tile_size=256)), SECONDS)
    others = replace(rung, plan=PLANS["host"]), replace(rung, job=replace(rung.job, query_chunk=None))
    report = Path(measured.report).read_text()
    for other in others:
        Path(measured.report).write_text(report)
        with pytest.raises(NotMeasured, match="not done"):
            rehearsals(tmp_path, resume=True).measure(other, 0.01)
    Path(measured.report).write_text('{"half of a')
    with pytest.raises(NotMeasured, match="query-chunks.json is not JSON"):
        without.measure(rung, SECONDS)
    with pytest.raises(NotMeasured, match="not done"):
        rehearsals(tmp_path, resume=True).measure(rung, 0.01)


def test_between_forward_and_backward_is_the_larger_of_two_moments():
    """Activations of all layers are there when the head's gradient is reduced, none when the embedding's is made."""
    config = replace(preset("llama-tiny"), untie_embeddings_and_output_weights=True)
    job = Job(config, build_head_schedule(8, 4, 4, 4), 4096, 4, 256, 64, torch.bfloat16)
    phases = predict_phases(job, [PLANS["gpu"]] * config.num_layers)
    larger, smaller = (phases[moment].device_bytes for moment in ("head backward", "embedding backward"))
    assert bytes_in("between", phases) == larger > smaller
    assert bytes_in("optimizer", phases) == smaller
    assert bytes_in("head", phases) == phases["head"].device_bytes
