"""Counted work against closed forms written down from the layer's equations."""

import doctest
from dataclasses import replace

import pytest
import torch

import megacp.planning.work as work
from megacp.context_parallel import engine
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents
from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.memory.host_region import HostRegion
from megacp.model.config import preset
from megacp.planner import Job, count_step, layer_peaks
from megacp.training.metrics import attention_flops

T, RANKS, D, F, HD, KD = 4096, 4, 256, 768, 8 * 32, 4 * 32
CONFIG = replace(preset("llama-tiny"), num_layers=3)


def job_of(heads_per_stage=4, config=CONFIG, **changes):
    fields = dict(tokens=T, sharding_ranks=RANKS, tile_size=1024, loss_tile_size=1024, dtype=torch.bfloat16)
    return Job(config, build_head_schedule(8, 4, RANKS, heads_per_stage), **(fields | changes))


def flops(counter):
    return sum(size * calls for size, calls in counter.items())


@pytest.mark.parametrize("changes", [{}, {"heads_per_stage": 8}, {"query_chunk": 1024}])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_matrix_products_by_part(changes, qk_norm):
    layer = layer_peaks(job_of(config=replace(CONFIG, qk_layernorm=qk_norm), **changes), PLANS["lean"])
    projections, mlp = 2 * T * D * (HD + 2 * KD), 2 * T * 3 * D * F
    again = 2 * T * D * (HD + KD) if qk_norm else 0  # the norms' backward needs what they were given
    assert layer.forward_work.gemm_flops == {"projections": projections, "mlp": mlp, "other": 2 * T * D * HD}
    # Backward: made again, its gradient by the input and by the weight; dO is the output projection's gradient by the input.
    # Of the MLP, down is not made again.
    assert layer.backward_work.gemm_flops == {
        "projections": 3 * projections + 2 * T * D * HD + again, "mlp": 2 * T * 8 * D * F, "other": 2 * 2 * T * D * HD
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"heads_per_stage": 8}, {"query_chunk": 1024}, {"sequences": 2}])
def test_attention_is_a_ranks_share_of_all_heads_and_pairs(changes):
    job = job_of(**changes)
    length = RANKS * T // job.sequences
    share = attention_flops(replace(CONFIG, num_layers=1), job.sequences * (length * (length + 1) // 2)) // RANKS
    kept, again = layer_peaks(job, LayerPlan()), layer_peaks(job, LayerPlan(output=RECOMPUTE, lse=RECOMPUTE))
    assert flops(kept.forward_work.attention_forward) == flops(kept.backward_work.attention_backward) == share
    assert not kept.backward_work.attention_forward
    assert flops(again.backward_work.attention_forward) == flops(again.backward_work.attention_backward) == share


@pytest.mark.parametrize("changes", [{}, {"heads_per_stage": 8}, {"query_chunk": 1024}])
def test_messages_are_those_of_the_schedule(changes):
    job = job_of(**changes)
    layer = layer_peaks(job, LayerPlan())
    q, k = (  # bytes that rank 0 sends to the others
        sum(len(heads_of(stage, rank)) for stage in job.schedule.stages for rank in range(1, RANKS)) * T * 32 * 2
        for heads_of in (job.schedule.query_heads, job.schedule.new_kv_heads)
    )
    sent_to_others = (RANKS - 1) / RANKS
    assert flops(layer.forward_work.messages) * sent_to_others == q + 2 * k + q  # q, k and v, o
    assert flops(layer.backward_work.messages) * sent_to_others == 4 * q + 4 * k  # q, o, do, dq; k, v, dk, dv


def test_copies_of_what_is_kept_elsewhere():
    job = job_of()
    unit, lse = job.unit, 4 * 8 * T
    lean = layer_peaks(job, PLANS["lean"])
    assert lean.forward_work.copies == {("h", "out"): unit, ("output", "out"): unit, ("output", "in"): unit, ("lse", "out"): lse}
    back = lean.backward_work.copies
    assert back["residual_grad", "out"] == unit and back["lse", "in"] == lse and back["output", "in"] == 2 * unit
    assert back["residual_grad", "in"] == (len(job.schedule.stages) + 1) * unit  # dO of each stage, and the end
    assert not layer_peaks(job, LayerPlan()).backward_work.copies
    # h: with the output for the MLP, before the first stage, between stages, at the end.
    assert back["h", "in"] == (len(job.schedule.stages) + 2) * unit
    only_h = layer_peaks(job, LayerPlan(h=HOST)).backward_work.copies
    assert only_h == {("h", "in"): back["h", "in"]}


def test_a_step_is_its_layers_and_its_head():
    job = job_of()
    counted = count_step(job, [PLANS["host"]] * 3)
    assert len(counted.layers) == 3 and counted.gemm_flops["head"] == 3 * 2 * T * D * CONFIG.vocab_size
    one = counted.layers[0]
    attention = flops(one.forward_work.attention_forward) * 3.5
    products = sum(one.forward_work.gemm_flops.values()) + sum(one.backward_work.gemm_flops.values())
    assert counted.flops == 3 * (attention + products) + counted.gemm_flops["head"]


def test_functions_are_themselves_afterwards():
    before = engine.all_to_all, engine.attention_forward, HostRegion.write
    with pytest.raises(ZeroDivisionError), work.WorkCounter():
        assert engine.all_to_all is not before[0]
        1 / 0
    assert before == (engine.all_to_all, engine.attention_forward, HostRegion.write)


def test_pairs_against_a_loop():
    documents = Documents((0, 3, 4, 9))
    for queries in range(1, 10):
        seen = [(q, k) for q in range(9 - queries, 9) for k in range(q + 1)
                if any(a <= k <= q < b for a, b in documents.spans())]  # fmt: skip
        assert work.visible_pairs(documents, queries) == len(seen)
    assert doctest.testmod(work).failed == 0
