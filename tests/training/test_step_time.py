"""Predicted seconds by hand from work and speeds, and speeds found again from what a GPU of known speeds would have measured."""

import doctest
import json
from dataclasses import replace

import pytest
import torch

import megacp.training.speeds as speeds_module
from megacp.argument_checks import ArgumentError
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import DISK, HOST, PLANS, LayerPlan
from megacp.model.config import preset
from megacp.planner import Job, count_step
from megacp.training.metrics import model_flops_per_step
from megacp.training.rehearsals import Rehearsal
from megacp.training.speeds import at, calibrated, of_documents, read_all_to_all, speeds_from, speeds_of
from megacp.training.step_time import predict_step_time

CONFIG = replace(preset("llama3-8b"), num_layers=3, vocab_size=4096)
H200 = speeds_of("NVIDIA H200")
FAST_LINKS = replace(H200, nvlink=1e30)
LAYER = CONFIG.layer_parameters()


def job_of(tokens=16384, ranks=8, **changes):
    fields = dict(tokens=tokens, sharding_ranks=8, tile_size=8192, loss_tile_size=2048, dtype=torch.bfloat16)
    return Job(CONFIG, build_head_schedule(32, 8, ranks, ranks), **(fields | changes))


def test_a_step_by_hand():
    job = job_of()
    time = predict_step_time(job, [LayerPlan()] * 3, FAST_LINKS, micro_batches=2)
    pairs = 131072 * 131073 // 2
    call = 4 * 128 * pairs  # one head; four stages a layer
    assert time.parts["attention forward"] == pytest.approx(2 * 3 * 4 * call / 680e12, rel=1e-3)  # 128K tokens, one head: the table's
    assert time.parts["attention backward"] == pytest.approx(2 * 3 * 4 * 2.5 * call / 613e12, rel=1e-3)
    assert time.parts["mlp"] == pytest.approx(2 * 3 * 2 * 16384 * 3 * 4096 * 14336 * 11 / 3 / (0.75 * 788e12))
    assert time.parts["output projection"] == pytest.approx(2 * 3 * 3 * 2 * 16384 * 4096**2 / (0.75 * 788e12))
    assert time.parts["head"] == pytest.approx(2 * 3 * 2 * 16384 * 4096 * 4096 / (0.75 * 788e12))
    assert time.parts["optimizer"] == pytest.approx(40 * CONFIG.parameter_count() / 8 / 4.8e12)
    assert sum(time.parts.values()) == time.seconds and time.tokens == 2 * 16384
    model = model_flops_per_step(CONFIG, 2 * 131072, 2 * pairs) / 8
    assert time.mfu == pytest.approx(model / time.seconds / 989e12)
    assert time.tokens_per_s_per_gpu == 2 * 16384 / time.seconds


def test_all_to_alls_and_what_prefetching_hides():
    job = job_of()
    plain = predict_step_time(job, [LayerPlan()] * 3, H200).parts
    message = 8 * 16384 * 128 * 2 / 8 * 7 / 331e9  # one head for each of the 7 others
    assert plain["all-to-all"] == pytest.approx(3 * 30 * message)  # q, o of 4 stages, k, v; q, o, do, dq of 4 stages, k, v, dk, dv
    ahead = predict_step_time(job, [LayerPlan(prefetch=True)] * 3, H200).parts
    assert ahead["all-to-all"] == pytest.approx(plain["all-to-all"] / 4)  # the first of four stages has nothing before it
    two_nodes = predict_step_time(job_of(tokens=8192, ranks=16, sharding_ranks=16), [LayerPlan()] * 3, H200).parts["all-to-all"]
    assert two_nodes > 2 * plain["all-to-all"]  # the same bytes, half of them over the network


@pytest.mark.parametrize("plan", [PLANS["lean"], PLANS["disk"], LayerPlan(h=HOST)])
def test_copies_take_time_only_beyond_what_they_hide_behind(plan):
    job = job_of()
    none = replace(FAST_LINKS, host_copy=1e30, disk=1e30)
    hidden = predict_step_time(job, [plan] * 3, none).parts
    assert hidden["host copies"] == 0 and hidden["disk"] == 0
    parts = {name: seconds for name, seconds in hidden.items() if name not in ("head", "optimizer")}
    projecting, rest = parts["projections"], sum(parts.values()) - parts["projections"]
    unit, stages = job.unit, 4
    reads = {"h": (stages + 1) * unit, "residual_grad": (stages + 1) * unit}  # of a backward while it projects
    layer = count_step(job, [plan]).layers[0]
    for place, speed in (("host copies", "host_copy"), ("disk", "disk")):
        slow = predict_step_time(job, [plan] * 3, replace(none, **{speed: 1e6})).parts[place]
        away = [name for name in ("h", "output", "lse", "residual_grad")
                if getattr(plan, name) == DISK or place == "host copies" and getattr(plan, name) == HOST]  # fmt: skip
        read = [0, sum(reads.get(name, 0) for name in away)]
        out, into = ([sum(work.copies[name, way] for name in away) for work in (layer.forward_work, layer.backward_work)] for way in ("out", "in"))
        other = [o + i - r if place == "disk" else max(o, i - r) for o, i, r in zip(out, into, read)]
        expected = 3 * (sum(read) + sum(other)) / 1e6 if away else 0
        # What hides: of the projections the backward's, two thirds and dO, of the rest both passes.
        assert expected - projecting - rest <= slow <= expected


def test_what_projections_read_hides_under_them_alone():
    job = job_of()
    work = count_step(job, [PLANS["host"]]).layers[0].backward_work
    projecting = work.gemm_flops["projections"] / H200.gemm["projections"]
    slow = replace(FAST_LINKS, host_copy=5 * job.unit / (3 * projecting))  # h, once a stage and once more, in three times that
    assert predict_step_time(job, [PLANS["host"]] * 3, slow).parts["host copies"] == pytest.approx(3 * 2 * projecting)


def test_gathers_and_reductions_hide_behind_layers():
    job = job_of(tokens=1024)
    slow = predict_step_time(job, [LayerPlan()] * 3, replace(H200, nvlink=1e9, all_to_all={8: ((1.0, 1e30),)})).parts
    busy = sum(seconds for part, seconds in slow.items() if part not in ("head", "optimizer", "FSDP"))
    assert slow["FSDP"] == pytest.approx(3 * (2 + 2 + 4) * LAYER * 7 / 8 / 1e9 - busy)
    free = {8: ((1.0, 1e30),)}  # all-to-alls that take no time
    for nvlink, slowest in ((100e9, 100e9), (675e9, 8 * 45e9)):  # of 16 GPUs: beyond a node by the adapters of its eight, if these are slower
        speeds = replace(H200, nvlink=nvlink, all_to_all=free, gemm=dict.fromkeys(H200.gemm, 1e30))
        parts = predict_step_time(job_of(tokens=128, sharding_ranks=16), [LayerPlan()] * 3, speeds).parts
        busy = parts["attention forward"] + parts["attention backward"]
        assert parts["FSDP"] == pytest.approx(3 * (2 + 2 + 4) * LAYER * 15 / 16 / slowest - busy)
    from_host = predict_step_time(replace(job, states_on_host=True), [LayerPlan()] * 3, H200).parts
    assert from_host["optimizer"] == pytest.approx(CONFIG.parameter_count() / 8 * (28 / 56e9 + 12 / 27e9))


def rehearsal_of(job, plans, true, **changes):
    """What a GPU of the speeds `true` would have reported."""
    time = predict_step_time(job, plans, true)
    seconds = dict(time.parts)
    parts = {name: seconds[name] for name in ("projections", "mlp", "head", "optimizer", "all-to-all")}
    parts["attention"] = seconds["attention forward"] + seconds["attention backward"]
    length = 8 * job.tokens
    step = sum(parts.values()) + seconds["output projection"]
    fields = dict(
        path="r.json", device="NVIDIA H200", job=job, plans=plans, micro_batches=1, attention="fa4",
        attention_pairs=length * (length + 1) // 2, peak=40 * 2**30, reserved=42 * 2**30, step_seconds=step, part_seconds=parts,
        copy_bytes_per_s=true.host_copy,
    )  # fmt: skip
    return Rehearsal(**(fields | changes))


def slower(speeds, factor):
    return replace(
        speeds, attention_forward=tuple((x, y * factor) for x, y in speeds.attention_forward),
        attention_backward=tuple((x, y * factor) for x, y in speeds.attention_backward), host_copy=40e9,
        gemm={"projections": 300e12, "mlp": 500e12, "head": 400e12, "other": 600e12},
    )  # fmt: skip


def test_a_rehearsal_gives_the_speeds_that_it_was_measured_with():
    job, plans, true = job_of(), [PLANS["host"]] * 3, slower(H200, 0.8)
    found = calibrated(H200, [rehearsal_of(job, plans, true)])
    assert found.gemm == pytest.approx(true.gemm) and found.host_copy == 40e9 and found.allocator_margin == pytest.approx(0.05)
    for one in (job, job_of(tokens=4096)):
        assert predict_step_time(one, plans, found).parts == pytest.approx(predict_step_time(one, plans, true).parts)
    assert found.sources["attention"] == "calibrated by 1 rehearsal" and found.sources["all-to-all"] == "estimated"


def test_two_rehearsals_correct_attention_by_its_length():
    plans, short, long = [PLANS["host"]] * 3, job_of(tokens=4096), job_of(tokens=65536)
    found = calibrated(H200, [rehearsal_of(long, plans, slower(H200, 0.9)), rehearsal_of(short, plans, slower(H200, 0.5))])
    before = predict_step_time(short, plans, H200).parts["attention forward"], predict_step_time(long, plans, H200).parts["attention forward"]
    after = predict_step_time(short, plans, found).parts["attention forward"], predict_step_time(long, plans, found).parts["attention forward"]
    assert before[0] / after[0] == pytest.approx(0.5, rel=0.2) and before[1] / after[1] == pytest.approx(0.9, rel=0.1)


def measured(job, plans, true, **changes):
    """A rehearsal, and what its attention is predicted to take by `found`."""
    rehearsal = rehearsal_of(job, plans, true, **changes)

    def predicted(found):
        parts = predict_step_time(job, plans, of_documents(found, rehearsal.pairs_share)).parts
        return parts["attention forward"] + parts["attention backward"]

    return rehearsal, predicted


@pytest.mark.parametrize("share", [1, 0.02])  # of the pairs of one document
def test_attention_of_rehearsals_is_predicted_as_it_was_measured(share):
    """Between the points of the curve, two at one length by their mean, and with documents by the size of theirs."""
    plans, cases = [PLANS["host"]] * 3, []
    for tokens, factor in ((8192, 0.7), (12288, 0.95), (12288, 0.85)):
        rehearsal, predicted = measured(job_of(tokens=tokens), plans, slower(H200, factor))
        if share < 1:
            pairs = round(rehearsal.attention_pairs * share)
            took = predicted(H200) / rehearsal.job.tokens  # any time: it is that of the documents
            rehearsal, predicted = measured(
                rehearsal.job, plans, H200, attention_pairs=pairs, part_seconds=rehearsal.part_seconds | {"attention": took}
            )
        cases.append((rehearsal, predicted))
    (first, of_first), (second, of_second), (third, _) = cases
    found = calibrated(H200, [first, second])
    assert of_first(found) == pytest.approx(first.part_seconds["attention"], rel=1e-9)
    assert of_second(found) == pytest.approx(second.part_seconds["attention"], rel=1e-9)
    both = of_second(calibrated(H200, [second, third]))
    low, high = sorted((second.part_seconds["attention"], third.part_seconds["attention"]))
    assert low <= both * (1 + 1e-9) and both <= high * (1 + 1e-9)


def test_a_stub_or_idle_layers_correct_no_times():
    job, plans, true = job_of(), [PLANS["host"]] * 3, slower(H200, 0.8)
    stub = calibrated(H200, [rehearsal_of(job, plans, true, attention="stub-fa4")])
    assert stub.gemm == H200.gemm and stub.attention_forward == H200.attention_forward and stub.host_copy == 40e9
    few = calibrated(H200, [rehearsal_of(job, plans, true, computing_layers=2)])
    assert few.gemm == H200.gemm and few.attention_forward == H200.attention_forward
    assert stub.allocator_margin == pytest.approx(0.05) and few.allocator_margin is None
    assert few.sources["no time of"] == "r.json (2 of 3 layers computed)"
    whole = rehearsal_of(job, plans, true)
    assert "no time of" not in calibrated(H200, [whole, replace(whole, computing_layers=3)]).sources


def test_other_gpus_are_scaled_and_say_so():
    a100 = speeds_of("A100")
    assert at(a100.attention_forward, 1e13) == pytest.approx(at(H200.attention_forward, 1e13) * 312 / 989)
    assert a100.sources["attention"].startswith("estimated") and H200.sources["attention"] == "measured on one H200"
    for unknown in ("RTX", "NVIDIA H100 PCIe", "NVIDIA L40S"):
        with pytest.raises(ArgumentError, match=f"--gpu {unknown} is not known; A100 or H100 or H200 or B200 works"):
            speeds_of(unknown)


def test_measured_all_to_alls_take_the_place_of_estimates(tmp_path):
    file = tmp_path / "a2a.json"
    entries = [dict(bytes_per_rank=n, seconds=s, gpus=g) for n, s, g in ((2**28, 2**28 / 3e11, 8), (2**20, 2**20 / 1e11, 8), (2**28, 1.0, 2))]
    file.write_text(json.dumps({"all_to_all": entries}))
    found = speeds_from(None, [str(file)])
    assert found.all_to_all == read_all_to_all(str(file)) and found.sources["all-to-all"] == "measured"
    assert found.all_to_all_seconds(2**20, 8) == pytest.approx(2**20 / 1e11)
    assert found.all_to_all_seconds(2**24, 8) == pytest.approx(2**24 / 2e11)  # half-way in the logarithm
    assert found.all_to_all_seconds(2**28, 16) == pytest.approx(2**28 / 3e11) and found.all_to_all_seconds(2**28, 2) == 1.0


@pytest.mark.parametrize(
    "text, said",
    [
        (None, r"r.json cannot be read \(No such file"),
        ("{", "r.json is not JSON"),
        ("[1]", "r.json holds a list, not an object"),
        ("{}", "r.json has no 'settings', so it is no rehearsal's report; a file that --rehearse-json of pretrain_llama.py writes works"),
        ('{"all_to_all": []}', r"--calibrate .*r.json has no measured all-to-alls \(no entry\)"),
        ('{"all_to_all": [{"bytes_per_rank": 1, "gpus": 2}]}', r"has no measured all-to-alls \('seconds'\)"),
        ('{"all_to_all": [{"bytes_per_rank": 1, "gpus": 1, "seconds": 1}]}', "GPUs are 2 or more"),
        ('{"all_to_all": 3}', "has no measured all-to-alls"),
    ],
)
def test_wrong_files_are_refused_by_name(text, said, tmp_path):
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        speeds_from(None, [str(file)])


def test_a_rehearsal_on_another_gpu_is_refused():
    rehearsal = rehearsal_of(job_of(), [LayerPlan()] * 3, H200)
    with pytest.raises(ArgumentError, match="--calibrate r.json was rehearsed on NVIDIA H200, not on A100; --gpu H200 works"):
        calibrated(speeds_of("A100"), [rehearsal])
    for device, gpu, advice in (
        ("NVIDIA H100 80GB HBM3", "A100", "--gpu H100 works"), ("NVIDIA H200", "H100", "--gpu H200 works"),  # of one peak
        ("NVIDIA L40S", "H100", "speeds of NVIDIA L40S are not known: without the file it works"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"was rehearsed on {device}, not on {gpu}; {advice}"):
            calibrated(speeds_of(gpu), [replace(rehearsal, device=device)])
    calibrated(speeds_of("H100"), [replace(rehearsal, device="NVIDIA H100 80GB HBM3")])


def test_docstring_examples_are_true():
    assert doctest.testmod(speeds_module).failed == 0
