"""Counts from a few tiles and chunks against counts of every step: the same bytes by name, the same work, whatever the job."""

from dataclasses import replace

import pytest
import torch

from megacp import planner
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents, calls
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import GPU, HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.model.config import preset
from megacp.planner import Job, run_head, run_layer
from megacp.planning import few_tiles
from megacp.planning.few_tiles import Loops, NotPeriodic, switches
from megacp.planning.work import WorkCounter

CONFIG = replace(preset("llama-tiny"), num_layers=1, hidden_size=64, ffn_hidden_size=128, vocab_size=512)  # 8 heads, 4 KV heads
TILE = 64
AGAIN = LayerPlan(output=RECOMPUTE, lse=RECOMPUTE)


def job_of(tokens, ranks=2, heads_per_stage=4, config=CONFIG, **changes):
    fields = dict(tokens=tokens, sharding_ranks=ranks, tile_size=TILE, loss_tile_size=TILE // 2, dtype=torch.bfloat16)
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, ranks, heads_per_stage)
    return Job(config, schedule, **(fields | changes))


NORMS = replace(CONFIG, qk_layernorm=True)
SHARED = replace(CONFIG, num_query_groups=1)
JOBS = {
    "all near": (job_of(24 * TILE), LayerPlan()),
    "a short last tile, lean": (job_of(15 * TILE + 7), PLANS["lean"]),
    "as few tiles as are skipped": (job_of(7 * TILE, 1, 8), PLANS["host"]),
    "fp32, q and k norms": (job_of(12 * TILE, config=NORMS, dtype=torch.float32), PLANS["lean"]),
    "float64, attention again": (job_of(11 * TILE, dtype=torch.float64, kernel="torch"), AGAIN),
    "two sequences": (job_of(12 * TILE, 4, sequences=2), LayerPlan(output=HOST, lse=HOST)),
    "chunks of a tile": (job_of(19 * TILE, query_chunk=TILE), PLANS["lean"]),
    "chunks of a tile, near, ahead": (job_of(16 * TILE, query_chunk=TILE), LayerPlan(prefetch=True)),
    "chunks that blocks of 128 do not divide": (job_of(17 * 50, tile_size=50, query_chunk=50, config=SHARED), PLANS["host"]),
    "a short last chunk, one rank": (job_of(29 * TILE + 3, 1, 4, query_chunk=2 * TILE), LayerPlan(h=HOST, prefetch=True)),
    "chunks of many tiles, again": (job_of(90 * TILE, 1, 8, query_chunk=8 * TILE), AGAIN),
    "chunks in fp32": (job_of(14 * TILE, 1, 8, query_chunk=TILE, dtype=torch.float32), LayerPlan(residual_grad=HOST, lse=GPU)),
    "chunks and two sequences": (job_of(13 * TILE, 2, 8, query_chunk=TILE, sequences=2), PLANS["lean"]),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_layer_counts_as_if_every_step_were_run(name):
    job, plan = JOBS[name]
    assert run_layer(job, plan) == run_layer(job, plan, every_step=True)


@pytest.mark.parametrize("tokens", [3 * TILE, 20 * TILE, 20 * TILE + 1])
def test_a_head_counts_as_if_every_step_were_run(tokens):
    assert run_head(job_of(tokens)) == run_head(job_of(tokens), every_step=True)


def test_a_hundred_times_the_tiles_are_the_same_steps(monkeypatch):
    steps = []
    dispatch = WorkCounter.__torch_dispatch__
    monkeypatch.setattr(WorkCounter, "__torch_dispatch__", lambda *args, **kwargs: steps.append(1) or dispatch(*args, **kwargs))
    for chunk in (None, TILE):
        taken = []
        for tiles in (30, 3000):
            steps.clear()
            run_layer(job_of(tiles * TILE, query_chunk=chunk), PLANS["lean"])
            taken.append(len(steps))
        assert taken[0] == taken[1] > 100


def loops_of(memory, tiles, chunk=None):
    return Loops(tiles * TILE, TILE, memory, WorkCounter(), chunk)


def test_memory_that_each_tile_leaves_is_noticed():
    with AllocationCounter() as memory:
        for _ in loops_of(memory, 20).tiles(0, 20 * TILE):
            torch.empty(8)
        kept = []
        with pytest.raises(NotPeriodic, match="each tile of 64 tokens leaves 32 bytes"):
            for _ in loops_of(memory, 20).tiles(0, 20 * TILE):
                kept.append(torch.empty(8))


@pytest.mark.parametrize("leaves, periodic", [(lambda start, stop: stop - start, True), (lambda start, stop: start, False)])
def test_memory_that_chunks_leave_must_be_that_of_their_tokens(leaves, periodic):
    with AllocationCounter() as memory:
        kept = []

        def run():
            for start, stop in loops_of(memory, 20, TILE).chunks():
                kept.append(torch.empty(leaves(start, stop)))

        if periodic:
            run()
            assert sum(map(len, kept)) == 20 * TILE
        else:
            with pytest.raises(NotPeriodic, match="chunks of 64 tokens leave"):
                run()


def test_what_is_not_periodic_is_run_in_full(monkeypatch):
    asked = []

    def run(job, plan, every_step=False):
        asked.append(every_step)
        if not every_step:
            raise NotPeriodic("each tile leaves 8 bytes")
        return "counted"

    monkeypatch.setattr(planner, "run_layer", run)
    assert planner.count_layer(job_of(5 * TILE), AGAIN) == "counted" and asked == [False, True]


def test_where_chunks_are_cut_and_that_those_that_begin_documents_are_all_run():
    one_head, two_heads = (build_head_schedule(16, 8, 8, heads) for heads in (8, 16))
    ten_million = Documents((0, 10 * 2**20))
    assert switches(one_head, 128, ten_million, 2**15) == []
    # Two heads of 128: up to 8,388,479 keys. Of 1,310,720 tokens a rank, rank 6 has as many up to its 16th chunk.
    assert switches(two_heads, 128, ten_million, 2**15) == [15]
    assert switches(one_head, 128, Documents((0, 2**20, 2**21)), 2**15) is None


@pytest.mark.parametrize("ranks, heads, share", [(1, 8, 0.1), (1, 8, 0.4), (1, 8, 0.74), (2, 4, 0.52), (2, 8, 0.97), (4, 8, 0.4)])
def test_chunks_cut_into_calls_of_single_heads_count_as_if_all_were_run(ranks, heads, share, monkeypatch):
    job = job_of(40 * TILE, ranks, heads, query_chunk=TILE)
    width = heads // ranks * CONFIG.kv_channels
    limit = int(share * ranks * 40 * TILE + 128) * width
    monkeypatch.setattr(few_tiles, "OFFSET_LIMIT", limit)
    monkeypatch.setattr(calls, "OFFSET_LIMIT", limit)
    assert run_layer(job, PLANS["lean"]) == run_layer(job, PLANS["lean"], every_step=True)
    cut = switches(job.schedule, CONFIG.kv_channels, Documents((0, ranks * job.tokens)), TILE)
    assert len(cut) == 1 and len(few_tiles._chunks(job.tokens, TILE, cut)) < 25
