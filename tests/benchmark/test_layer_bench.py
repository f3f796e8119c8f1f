"""The layer alone: products by a plain count, peaks as the planner predicts them, medians by hand, values that are numbers."""

import dataclasses

import pytest
import torch

from megacp.benchmark import layer_bench
from megacp.benchmark.ceilings import Ceilings
from megacp.benchmark.layer_bench import LayerBench, LayerCase, Repetition, gemm_flops, layer_row
from megacp.memory.counting import AllocationCounter
from megacp.memory.units import GIB
from megacp.model.config import preset
from megacp.planner import Job, layer_peaks
from megacp.training.metrics import causal_pairs

TINY = preset("llama-tiny")
CASE = LayerCase(TINY, ranks=4, seq_length=4096, heads_per_stage=4, tile_size=256)
CPU = torch.device("cpu")
CEILINGS = Ceilings(side=8192, dtype="bfloat16", matmul=1e12, device_copy=1e12, to_host=1e9, to_device=1e9)

QUERIES, KEYS, OUTPUT, MLP = 256 * 256, 2 * 128 * 256, 256 * 256, 768 * 256  # weights: q; k and v; o; each of three


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"heads_per_stage": 8}, {"tile_size": 1024}, {"query_chunk": 512}, {"activation_memory": "lean"}, {"documents": 3},
        {"activation_memory": "disk", "disk_directory": "no such folder"},
    ],
)  # fmt: skip
def test_products_that_a_layer_executes(changes):
    case = dataclasses.replace(CASE, **changes)
    forward = QUERIES + KEYS + OUTPUT + 3 * MLP
    again = QUERIES + KEYS + OUTPUT + 2 * MLP  # all but down_proj run once more in the backward
    assert gemm_flops(case) == (2 * forward * 1024, 2 * (again + 2 * forward) * 1024)


def test_attention_runs_again_only_where_the_plan_says_so():
    forward, backward = CASE.attention_flops
    assert forward == 4 * 8 * 32 * causal_pairs((0, 4096)) // 4 and backward == forward * 5 // 2
    assert dataclasses.replace(CASE, recompute="full").attention_flops == (forward, backward + forward)


def test_names_of_methods_and_plans():
    assert (CASE.method, dataclasses.replace(CASE, heads_per_stage=8).method) == ("upipe U=4", "a2a")
    assert dataclasses.replace(CASE, activation_memory="lean", recompute="full").plan_name == "lean, recompute"
    assert dataclasses.replace(CASE, recompute="none").plan_name == "gpu, no recompute"
    ahead = [dataclasses.replace(CASE, prefetch=prefetch).describe()["prefetch"] for prefetch in (0, 1)]
    assert ahead == [0, 1]


@pytest.mark.parametrize(
    "memory, heads, chunk, prefetch", [("gpu", 4, None, 0), ("gpu", 4, None, 1), ("gpu", 8, None, 0), ("lean", 4, 256, 0)]
)
def test_peaks_are_those_that_the_planner_counts(memory, heads, chunk, prefetch):
    changes = dict(activation_memory=memory, heads_per_stage=heads, query_chunk=chunk, prefetch=prefetch)
    case = dataclasses.replace(CASE, backend="stub-fa4", **changes)
    job = Job(TINY, case.schedule, case.tokens, 4, case.tile_size, 4096, torch.float32, chunk)
    predicted = layer_peaks(job, case.plan)
    with AllocationCounter() as counter:
        bench = LayerBench(case, CPU, torch.float32, counter)
        first, second = bench.run(), bench.run()
    row = layer_row(case, bench, first, [second], CEILINGS)
    weight_gradients = 4 * TINY.layer_parameters()
    for name in ("forward_peak", "backward_peak", "forward_added", "backward_added"):
        assert getattr(first, name) == getattr(second, name)  # nothing of the first repetition is left over
    assert row["forward_u"] * job.unit == pytest.approx(predicted.forward, rel=0.01)
    assert row["backward_u"] * job.unit == pytest.approx(predicted.backward - weight_gradients, rel=0.01)


def test_figures_of_a_row_by_hand():
    with AllocationCounter() as counter:
        bench = LayerBench(CASE, CPU, torch.float32, counter)
    weight_gradients, u = 4 * TINY.layer_parameters(), 1024 * 256 * 4
    first = Repetition(9.0, 9.0, 3 * GIB, 5 * GIB, 4 * u, 7 * u + weight_gradients)
    timed = [
        Repetition(1.0, 2.0, 3 * GIB, 4 * GIB, 3 * u, 6 * u + weight_gradients),
        Repetition(5.0, 5.0, 3 * GIB, 4 * GIB, 3 * u, 6 * u + weight_gradients),
        Repetition(1.5, 2.5, 3 * GIB, 4 * GIB, 3 * u, 6 * u + weight_gradients),
    ]
    row = layer_row(CASE, bench, first, timed, CEILINGS)
    assert (row["first_s"], row["forward_s"], row["backward_s"], row["seconds"], row["repeats"]) == (18.0, 1.5, 2.5, 4.0, 3)
    assert row["spread"] == pytest.approx((10 - 3) / 4)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(1024 / (4 * 4.0))  # tokens of the rank / (4 layers x 4 seconds)
    weights = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256
    flops = 3 * (2 * weights * 1024 + 4 * 8 * 32 * (4096 * 4097 // 2) / 4)
    assert row["model_tflops"] == pytest.approx(flops / 4.0 / 1e12) and row["matmul_share"] == pytest.approx(flops / 4.0 / 1e12)
    assert (row["peak_gib"], row["forward_u"], row["backward_u"]) == (5.0, 4.0, 7.0)


def test_a_gradient_that_is_no_number_is_told():
    with AllocationCounter() as counter:
        bench = LayerBench(CASE, CPU, torch.float32, counter)
        bench.run()
        bench.check_finite()
        with torch.no_grad():
            bench.layers[0].down_proj.fill_(float("nan"))
        bench.run()
    with pytest.raises(ArithmeticError, match="not finite"):
        bench.check_finite()


def test_layers_one_after_another_are_told_by_the_layer(monkeypatch):
    def six_seconds(call, device):
        call()
        return 6.0

    monkeypatch.setattr(layer_bench, "seconds_of", six_seconds)
    with AllocationCounter() as counter:
        bench = LayerBench(CASE, CPU, torch.float32, counter, layers=3)
        alone, all_three = bench.run(), bench.run(layers=3)
    assert (alone.seconds, all_three.forward_s, all_three.backward_s) == (12.0, 2.0, 2.0)
    assert all_three.forward_peak > alone.forward_peak  # three layers' tensors are kept
    bench.check_finite()
