"""Rehearsals in which few layers compute: the memory of each phase, to the byte, is that of the rehearsal in which all do."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from megacp.argument_checks import ArgumentError
from megacp.context_parallel.all_to_all import Loopback
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import PLANS, LayerPlan
from megacp.memory.store import ActivationStore
from megacp.model.config import preset
from megacp.model.layer_context import LayerContext
from megacp.model.llama import Llama
from megacp.planner import Job, layer_peaks
from megacp.rehearsal import SharedRoom
from megacp.training.idle_layers import computing_layers, idle_layers
from megacp.training.rehearsals import compare, read_rehearsal

COMMON = (
    "--num-layers 6 --hidden-size 128 --ffn-hidden-size 256 --kv-channels 16 --num-attention-heads 8 --num-query-groups 4 "
    "--vocab-size 512 --context-parallel-size 4 --seq-length 4096 --mlp-tile-size 512 --loss-tile-size 256 --attention-mask causal "
    "--mock-data --device cpu --rehearse-world-size 4 --rehearse-attention stub --train-iters 1"
)
UNTIED, AUTO = "--untie-embeddings-and-output-weights", "--activation-memory auto --seq-length 8192"
SETTINGS = {  # K, flags
    "gpu": (1, "--activation-memory gpu"),
    "gpu, short": (2, f"--activation-memory gpu --hidden-size 512 --seq-length 1024 {UNTIED}"),
    "host, bf16": (1, f"--bf16 --activation-memory host {UNTIED}"),
    "lean, query chunks": (1, "--activation-memory lean --upipe-query-chunk 512"),
    "attention again": (2, "--activation-memory gpu --recompute-granularity full"),
    "nothing again": (1, "--activation-memory gpu --recompute-granularity none"),
    "nothing again, stages of query chunks": (
        1, f"--activation-memory gpu --recompute-granularity none --upipe-query-chunk 512 --upipe-heads-per-stage 4 {UNTIED}",
    ),
    "states on the host": (1, "--activation-memory lean --optimizer-cpu-offload"),
    "states on the host, gpu": (2, "--activation-memory gpu --optimizer-cpu-offload --hidden-size 512 --seq-length 512"),
    "accumulating": (1, f"--activation-memory gpu --global-batch-size 2 --seq-length 2048 {UNTIED}"),
    "accumulating pairs": (1, "--activation-memory host --global-batch-size 4 --micro-batch-size 2 --seq-length 1024"),
    "bf16, q and k norms, prefetched": (2, "--bf16 --activation-memory gpu --qk-layernorm --upipe-prefetch 1 --seq-length 2048"),
    "data parallel, rank 7": (1, "--activation-memory host --rehearse-world-size 8 --rehearse-rank 7 --seq-length 2048"),
    "two plans": (2, f"{AUTO} --gpu-memory-gib 0.018"),
    "two plans, disk": (2, f"{AUTO} --gpu-memory-gib 0.014 --host-memory-gib 0.0095 --disk-offload-dir"),
}  # fmt: skip
OF_SPEED = ("steps", "step_seconds", "part_seconds", "tokens_per_s_per_gpu", "copy_bytes_per_s")


def rehearse(monkeypatch, file, flags: str):
    import pretrain_llama

    dtype = [] if "--bf16" in flags else ["--fp32"]
    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *COMMON.split(), *dtype, *flags.split(), "--rehearse-json", str(file)])
    assert pretrain_llama.main() == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_the_memory_of_all_layers_is_there_to_the_byte(name, monkeypatch, tmp_path):
    layers, flags = SETTINGS[name]
    if flags.endswith("--disk-offload-dir"):
        flags = f"{flags} {tmp_path}"
    keeps, keep = [], SharedRoom.keep
    monkeypatch.setattr(SharedRoom, "keep", lambda store, layer, h_Td: keeps.append(layer) or keep(store, layer, h_Td))
    whole, file = rehearse(monkeypatch, tmp_path / "whole", flags), tmp_path / "few"
    keeps.clear()
    few = rehearse(monkeypatch, file, f"{flags} --rehearse-layers {layers}")
    assert len(few["computing_layers"]) == layers and set(keeps) == set(few["computing_layers"])  # the others offload nothing
    assert len({json.dumps(plan) for plan in whole["settings"]["plans"]}) == 1 + (AUTO in flags)
    differing = {key for key in whole if whole[key] != few[key]}
    assert differing <= {*OF_SPEED, "computing_layers", "settings"}, {key: (whole[key], few[key]) for key in differing}
    assert few["settings"] == whole["settings"] | {"rehearsed_layers": layers}
    rehearsals = read_rehearsal(str(file)), read_rehearsal(str(tmp_path / "whole"))
    assert compare(rehearsals[0])["error"] == compare(rehearsals[1])["error"]
    assert rehearsals[0].not_timed == f"{layers} of 6 layers computed" and few["tokens_per_s_per_gpu"] is None


def test_the_table_says_which_layers_compute_and_no_speed(monkeypatch, tmp_path, capsys):
    rehearse(monkeypatch, tmp_path / "r", "--activation-memory host --seq-length 1024 --rehearse-layers 2")
    text = capsys.readouterr().out
    assert "2 of 6 layers compute (number 0, 1); the others only take their memory" in text
    assert "last step with 2 of 6 layers" in text and "tokens/s/GPU" not in text
    rehearse(monkeypatch, tmp_path / "r", "--activation-memory host --seq-length 1024 --rehearse-layers 6")
    text = capsys.readouterr().out
    assert "layers compute" not in text and "with 6 of" not in text and "tokens/s/GPU, without attention" in text


CONFIG = replace(preset("llama3-8b"), num_layers=5, vocab_size=4096)
LONG = Job(CONFIG, build_head_schedule(32, 8, 8, 8), 131072, 8, 8192, 2048, torch.bfloat16)
SHORT = replace(LONG, tokens=1024)
NEAR, FAR, GPU = LayerPlan(), PLANS["host"], torch.device("cuda")
PRODUCTS = LayerPlan(products=True)


@pytest.mark.parametrize(
    "job, plans, layers",
    [
        (LONG, [NEAR] * 5, [4]),  # a layer keeps 2 GiB and leaves 100 MiB of gradients: the last has most behind it
        (SHORT, [NEAR] * 5, [1, 4]),  # keeps 16 MiB: forward the last, backward the first whose reduction and gather are layers'
        (LONG, [FAR] * 5, [1]),  # nothing is kept: forward all alike, backward as before
        (LONG, [FAR] * 3 + [NEAR] * 2, [1, 4]),
        (LONG, [PLANS["disk"], FAR, FAR, NEAR, NEAR], [0, 1, 4]),
    ],
)
def test_each_plan_computes_where_most_is_there(job, plans, layers):
    assert computing_layers(job, plans, len(layers), GPU) == layers
    assert computing_layers(job, plans, 5, GPU) == [0, 1, 2, 3, 4]
    with_one_more = sorted({*layers, min({*range(5)} - {*layers})})
    assert computing_layers(job, plans, len(layers) + 1, GPU) == with_one_more
    if len(layers) > 1:
        shown, fewer, works = ", ".join(map(str, layers)), len(layers) - 1, f"--rehearse-layers {len(layers)} or more works"
        with pytest.raises(ArgumentError, match=f"--rehearse-layers {fewer} cannot .* layers {shown} .*; {works}"):
            computing_layers(job, plans, fewer, GPU)


@pytest.mark.parametrize("plan", [NEAR, FAR, replace(FAR, h="gpu"), replace(NEAR, output="recompute", lse="recompute"), PRODUCTS])
def test_an_idle_layer_keeps_what_a_layer_keeps_and_makes_its_gradients(plan):
    with torch.device("meta"):
        model, positions_T = Llama(replace(CONFIG, num_layers=1), dtype=torch.bfloat16), torch.empty(LONG.tokens, dtype=torch.int64)
        h_Td = torch.empty(LONG.tokens, CONFIG.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    store = ActivationStore([plan], LONG.geometry, torch.device("meta"))
    attention = AttentionSettings(LONG.schedule, Loopback(8), Documents((0, 8 * LONG.tokens)), 1.0, "stub-fa4")
    context = LayerContext(attention, positions_T, torch.empty(64), 1.0, LONG.tile_size, store)
    kept, peaks = layer_peaks(LONG, plan).kept, []
    with AllocationCounter("meta") as memory, idle_layers(model, []):
        out_Td = model.layers[0](h_Td, context)
        assert memory.peak_bytes() == memory.live_bytes() == kept  # h is not counted; where it is kept, the output is as large
        out_Td.grad_fn.register_hook(lambda *_: peaks.append(memory.peak_bytes()))
        out_Td.backward(torch.empty_like(out_Td))
    above = peaks[0] - (kept + LONG.unit + 4 * CONFIG.layer_parameters())
    assert 0 <= above <= 2 * CONFIG.hidden_size**2  # autograd turns them into bf16, a weight's at a time
