"""The rungs of the ladder against hand counts and the planner."""

from dataclasses import replace

import pytest
import torch

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.model.config import preset
from megacp.planner import Job, predict, predict_phases
from megacp.planning.host_states import host_state_bytes
from megacp.planning.ladder import PARTS, counted_rung, ladder
from megacp.training.capacity import job_of, parse_planned

FLAGS = "--model llama-tiny --mlp-tile-size 1024 --loss-tile-size 1024 --seq-length 65536".split()


@pytest.fixture(scope="module")
def job():
    return job_of(parse_planned(FLAGS, ""), 4, 65536)[1]


@pytest.fixture(scope="module")
def rungs(job):
    return {rung.name: rung for rung in ladder(job)}


def test_every_rung_takes_less_than_the_one_before(rungs):
    totals = [rung.total for rung in rungs.values()]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals) == 9
    assert [rung.how for rung in rungs.values()] == ["formula"] * 3 + ["counted"] * 6
    assert all((rung.how == "counted") == (rung.job is not None) == (rung.plan is not None) for rung in rungs.values())


def test_counted_bars_are_the_planners(rungs, job):
    lean = predict(job, [PLANS["lean"]] * 4)
    assert rungs["+ saved attention, lean"].total == lean.device_bytes
    assert rungs["+ saved attention, lean"].host_bytes == lean.host_bytes
    away = LayerPlan(h=HOST, output=RECOMPUTE, lse=RECOMPUTE)
    assert rungs["+ UPipe"].total == predict(job, [away] * 4).device_bytes
    assert rungs["+ recompute"].parts["kept activations"] == 4 * job.unit  # h of each layer
    parts = rungs["+ saved attention, lean"].parts
    buffers = sum(parts.get(part, 0) for part in ("hidden states", "attention", "weight gradients", "tiles", "output head"))
    assert buffers == lean.parts["buffers"]
    assert set(parts) <= set(PARTS), "a part that is not drawn"


def test_states_leave_for_the_host_on_a_rung_of_their_own(job, rungs):
    *before, last = ladder(replace(job, states_on_host=True))
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


def test_a_prediction_is_the_highest_of_its_phases(rungs):
    for rung in (rungs["+ recompute"], rungs["+ query chunks"]):
        plans = [rung.plan] * rung.job.config.num_layers
        phases = predict_phases(rung.job, plans)
        assert sorted(phases) == ["embedding backward", "head", "layer backward", "layer forward"]
        assert all(name == phase.moment for name, phase in phases.items())
        assert max(phases.values(), key=lambda phase: phase.device_bytes) == predict(rung.job, plans)


def test_the_embeddings_gradient_is_one_of_weights():
    """With a large tied vocabulary and few tokens the peak is where the embedding's gradient is made."""
    config = replace(preset("llama-tiny"), vocab_size=2**17)
    job = Job(config, build_head_schedule(8, 4, 4, 4), 1024, 4, 256, 16, torch.bfloat16)
    prediction, rung = predict(job, [PLANS["lean"]] * 4), counted_rung("any", job, PLANS["lean"])
    assert prediction.moment == "embedding backward" and rung.total == prediction.device_bytes
    embedding = prediction.buffers["gradient of the embedding"] + prediction.buffers["sums by token"]
    assert rung.parts["weight gradients"] == embedding and "attention" not in rung.parts
