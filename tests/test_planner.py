"""Predicted memory against bytes counted by hand, and the choice of plans against a plain search."""

from dataclasses import replace

import pytest
import torch

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import DISK, GPU, HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.model.config import preset
from megacp.planner import Job, choose_plans, head_count, layer_peaks, predict, table

CONFIG = replace(preset("llama3-8b"), num_layers=6, vocab_size=4096)  # a small head: the layers are what counts


def job_of(tokens=131072, heads_per_stage=8, **changes):
    """One rank of 8; at 131,072 tokens a rank (1M in all) u is 1 GiB."""
    fields = dict(tokens=tokens, sharding_ranks=8, tile_size=16384, loss_tile_size=1024, dtype=torch.bfloat16)
    return Job(CONFIG, build_head_schedule(32, 8, 8, heads_per_stage), **(fields | changes))


def test_what_a_layer_keeps_is_what_its_plan_says():
    job = job_of()
    lse = 32 * 131072 * 4
    assert layer_peaks(job, LayerPlan()).kept == 2 * GIB + lse
    assert layer_peaks(job, PLANS["host"]).kept == 0
    assert layer_peaks(job, PLANS["disk"]).kept == 0
    assert layer_peaks(job, LayerPlan(output=HOST, lse=HOST)).kept == GIB
    assert layer_peaks(job, LayerPlan(output=RECOMPUTE, lse=RECOMPUTE)).kept == GIB


@pytest.mark.parametrize(
    "plan, query_chunk, forward, backward",
    [
        # In u, without h and output where the plan keeps them on the device. Forward, streamed: h 1, one stage's q, k, v, o 1.
        # Backward: g, dxn 2; q, k, v, o, do, dq, dk, dv 2; dk, dv of the stages before 1/2; the kernel's fp32 sum of dq 1/2.
        (LayerPlan(output=GPU, lse=HOST, h=HOST), None, 2.8, 5.1),
        (PLANS["host"], None, 2.1, 5.1),
        (PLANS["lean"], None, 2.1, 4.1),  # g's memory serves dxn
        (PLANS["lean"], 16384, 2.1, 3.3),  # only k, v, their fp32 sums and one call's dk, dv span the sequence
    ],
)
def test_activation_peaks_in_units_of_a_hidden_state(plan, query_chunk, forward, backward):
    job = job_of(query_chunk=query_chunk, tile_size=2048)  # tiles that are small beside u
    peaks = layer_peaks(job, plan)
    weight_gradients = 4 * CONFIG.layer_parameters()
    output_kept = 3 * GIB // 4 if plan.output == GPU else 0  # of four stages three are not done yet
    assert peaks.forward / GIB <= forward
    assert (peaks.backward - weight_gradients - output_kept) / GIB <= backward
    assert peaks.backward - weight_gradients > 2.5 * GIB, "less than dxn, k, v, dk and dv take"


def test_head_memory_is_its_tile_its_weight_gradient_and_two_hidden_states():
    parts = head_count(job_of()).parts
    small, large = (sum(head_count(job).parts.values()) for job in (job_of(), job_of(tokens=262144)))
    assert parts["hidden state"] == parts["gradient of the hidden state"] == GIB and parts["labels"] == 8 * 131072
    assert large - small == 2 * GIB + 8 * 131072  # h and dh; labels
    assert parts["weight gradients"] == 4096 * 4096 * 4 + 4096 * 4  # lm_head's and the norm's, in fp32
    tile = 1024 * 4096 * 2  # of logits as of hidden states, with this vocabulary: y, its logits and the gradient of y at once
    assert 3 * tile < parts["logits tile"] < 3.01 * tile


def test_a_prediction_has_the_states_and_the_deepest_moment():
    job = job_of()
    everything = predict(job, [LayerPlan()] * 6)
    assert everything.parts["states"] == 12 * CONFIG.parameter_count() // 8
    head_gradient = 4 * 4096 * 4096 // 8
    assert everything.parts["gradients"] == head_gradient, "the last layer's backward: of the layers there is no gradient yet"
    accumulating = predict(replace(job, accumulates=True), [LayerPlan()] * 6)
    assert accumulating.parts["gradients"] == 4 * CONFIG.parameter_count() // 8
    output_done = 2 * GIB // 4 + 4 * 8 * 131072  # in the second stage of the last layer: two outputs and a lse are freed
    assert everything.parts["kept activations"] == 6 * layer_peaks(job, LayerPlan()).kept - output_done
    assert everything.host_bytes == everything.disk_bytes == 0
    last_near = [PLANS["host"]] * 5 + [LayerPlan()]
    assert predict(job, last_near).device_bytes < everything.device_bytes - 4 * GIB
    assert predict(job, last_near).host_bytes == planned_bytes(last_near, job.geometry, HOST)


STAGE = GIB // 4  # one of four stages of heads, of 8 ranks' tokens: q, o, do, dq, and k and v each


@pytest.mark.parametrize(
    "plan, query_chunk, expected",
    [
        # dk and dv: those of the stages before, and of the call. The kernel's sum of dq is in fp32, with two fp32 rows.
        (PLANS["gpu"], None, {"residual gradient": 4, "dxn": 4, "k, v": 2, "dk, dv": 4, "q": 1, "o": 1, "do": 1, "dq": 1}),
        (PLANS["host"], None, {"residual gradient": 4, "dxn": 4, "k, v": 2, "dk, dv": 4, "q": 1, "o": 1, "do": 1, "dq": 1}),
        (PLANS["lean"], None, {"residual gradient": 4, "k, v": 2, "dk, dv": 4, "q": 1, "o": 1, "do": 1, "dq": 1}),
        # Chunks: k, v and their sums in fp32 span the sequence; the rest an eighth of it, and the dk, dv of one call.
        (PLANS["lean"], 16384, {"residual gradient": 4, "k, v": 2, "dk, dv sums": 4, "dk, dv": 2, "q": 1 / 8, "o": 1 / 8, "do": 1 / 8}),
    ],
)
def test_buffers_have_names_and_add_up_to_the_counted_peak(plan, query_chunk, expected):
    job = job_of(query_chunk=query_chunk, tile_size=2048)  # tiles that are small beside u
    layer = layer_peaks(job, plan)
    found = layer.backward_parts
    assert sum(found.values()) == layer.backward
    for name, stages in expected.items():
        assert found[name] == stages * STAGE, name
    assert found["weight gradients"] == 4 * CONFIG.layer_parameters()
    if query_chunk is None:
        assert found["attention workspace"] == 2 * STAGE + 2 * 4 * 8 * 131072
    unnamed = set(found) - set(expected) - {"weight gradients", "attention workspace", "kept activations", "lse", "dq"}
    assert sum(found[name] for name in unnamed) < STAGE / 100
    prediction = predict(job, [plan] * 6)
    assert sum(prediction.buffers.values()) == prediction.parts["buffers"]
    assert prediction.moment == "layer backward"


def test_outputs_put_together_from_chunks_are_named_as_outputs():
    job = job_of(tokens=16384, query_chunk=8192, tile_size=2048)
    found = layer_peaks(job, LayerPlan(prefetch=True)).forward_parts
    assert found["o"] == job.unit  # 32 heads of 128 are d
    assert found["output projection tile"] < job.unit / 4


def test_states_on_the_host_leave_the_device_and_count_against_the_host():
    """A weight and a gradient in pinned memory, which comes in powers of two, and two moments, for the largest shard of each weight."""
    near, away = job_of(tokens=16384), job_of(tokens=16384, states_on_host=True)
    plans = [PLANS["host"]] * 6
    before, after = predict(near, plans), predict(away, plans)
    gone = {"states", "gradients"}
    assert all(after.parts[part] == 0 for part in gone)
    assert {name: bytes_ for name, bytes_ in after.parts.items() if name not in gone} == {
        name: bytes_ for name, bytes_ in before.parts.items() if name not in gone
    }
    # In MiB of fp32, over 8 ranks: q, o 8; k, v 2; three of the MLP 28, which take 32; norms 1/512; both tables 8.
    layer = 2 * (8 + 2) * 4 + 3 * (2 * 32 + 2 * 28) + 2 * 4 / 512
    assert away.host_state_bytes == (6 * layer + 2 * 4 * 8 + 4 / 512) * 2**20
    assert after.host_bytes - before.host_bytes == away.host_state_bytes

    limit = predict(away, plans).device_bytes
    chosen = choose_plans(away, limit, None, 0, False)
    needed = away.host_state_bytes + planned_bytes(chosen, away.geometry, HOST)
    assert choose_plans(away, limit, needed, 0, False) == chosen
    with pytest.raises(ValueError, match="beside 2.* GiB of states on the host"):
        choose_plans(away, limit, away.host_state_bytes - 1, 0, False)


def near_layers(plans):
    return sum(plan.h == GPU for plan in plans)


def test_auto_keeps_as_many_layers_on_the_device_as_fit():
    job = job_of()
    all_near, none_near = (predict(job, [plan] * 6).device_bytes for plan in (LayerPlan(), PLANS["host"]))
    assert near_layers(choose_plans(job, all_near, None, 0, False)) == 6
    for near in range(6):
        plans = [PLANS["host"]] * (6 - near) + [LayerPlan()] * near
        limit = predict(job, plans).device_bytes
        chosen = choose_plans(job, limit, None, 0, False)
        assert predict(job, chosen).device_bytes <= limit
        # No plan of one more layer on the device fits.
        more = [PLANS["host"]] * (5 - near_layers(chosen)) + [LayerPlan()] * (near_layers(chosen) + 1)
        assert near_layers(chosen) == 6 or predict(job, more).device_bytes > limit
    assert all(plan.residual_grad == GPU for plan in choose_plans(job, none_near, None, 0, False))
    assert all(plan.residual_grad == HOST for plan in choose_plans(job, none_near - 1, None, 0, False))


def test_auto_takes_the_disk_for_what_the_host_cannot_hold():
    job = job_of()
    limit = predict(job, [PLANS["host"]] * 6).device_bytes
    host_of_three = planned_bytes([PLANS["disk"]] * 3 + [PLANS["host"]] * 3, job.geometry, HOST)
    assert predict(job, [PLANS["disk"]] * 6).device_bytes == limit
    plans = choose_plans(job, limit, host_of_three, None, False)
    assert [plan.h for plan in plans] == [DISK] * 3 + [HOST] * 3
    with pytest.raises(ValueError, match="host and disk cannot take"):
        choose_plans(job, limit, host_of_three, 0, False)
    again = choose_plans(job, limit + GIB, host_of_three, 0, True)
    assert {plan.output for plan in again} <= {GPU, RECOMPUTE} and RECOMPUTE in {plan.output for plan in again}
    assert planned_bytes(again, job.geometry, HOST) <= host_of_three


def test_auto_says_what_is_missing():
    least = predict(job_of(), [PLANS["lean"]] * 6).device_bytes
    with pytest.raises(ValueError, match=f"{least / GIB:.2f} GiB of GPU memory even with all activations elsewhere"):
        choose_plans(job_of(), least - 1, None, None, False)
    with pytest.raises(ValueError, match="host and disk cannot take"):  # the residual gradient elsewhere is enough for the device
        choose_plans(job_of(), least, 0, 0, False)


def test_the_table_names_runs_of_layers():
    lines = table([PLANS["host"]] * 2 + [LayerPlan()])
    assert lines[0].startswith("layers 0-1: h host, output host, lse host")
    assert lines[1].startswith("layer 2: h gpu")
