"""Predicted peaks against rehearsed ones: whole training steps with FSDP on a CPU, every allocation of the rank counted."""

import json
import sys

import pytest

from megacp.planner import predict
from megacp.training.rehearsals import read_rehearsal

COMMON = (
    "--num-layers 3 --hidden-size 128 --ffn-hidden-size 384 --kv-channels 16 --num-attention-heads 8 --num-query-groups 4 "
    "--vocab-size 1024 --context-parallel-size 4 --seq-length 8192 --mlp-tile-size 512 --loss-tile-size 512 --attention-mask causal "
    "--mock-data --device cpu --rehearse-world-size 4 --rehearse-attention stub --train-iters 2"
)
UNTIED = "--untie-embeddings-and-output-weights"
SETTINGS = {
    "gpu": "--activation-memory gpu",
    "host": "--activation-memory host",
    "lean": "--activation-memory lean",
    "untied": f"--activation-memory gpu {UNTIED}",
    "untied, lean": f"--activation-memory lean {UNTIED} --seq-length 16384",
    "two stages in one": "--activation-memory lean --upipe-heads-per-stage 8",
    "attention again": "--activation-memory host --recompute-granularity full",
    "nothing again": "--activation-memory gpu --recompute-granularity none",
    "query chunks": "--activation-memory lean --upipe-query-chunk 1024",
    "one stage, attention again": "--activation-memory gpu --upipe-heads-per-stage 8 --recompute-granularity full",
    "wide": "--activation-memory gpu --hidden-size 512 --ffn-hidden-size 1024 --seq-length 2048",
    "with q and k norms": "--activation-memory gpu --hidden-size 192 --qk-layernorm --seq-length 4096",
    "accumulating": "--activation-memory host --global-batch-size 2 --seq-length 4096",
    "data parallel, rank 7": "--activation-memory host --rehearse-world-size 8 --rehearse-rank 7",
    "two sequences at a time": "--activation-memory gpu --micro-batch-size 2 --seq-length 4096",
    "large vocabulary": f"--activation-memory gpu --vocab-size 8192 {UNTIED} --seq-length 4096",
    "large tied vocabulary": "--bf16 --activation-memory host --vocab-size 16384 --seq-length 2048 --loss-tile-size 8",
    "large head": f"--bf16 --activation-memory host --vocab-size 16384 {UNTIED} --seq-length 2048 --loss-tile-size 8",
    "one layer": "--activation-memory gpu --num-layers 1 --seq-length 4096",
}


def rehearse(monkeypatch, file, flags: str):
    """In fp32, where a CPU's kernels are those that are counted; in bf16 the prediction is of a GPU's."""
    import pretrain_llama

    dtype = [] if "--bf16" in flags else ["--fp32"]
    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *COMMON.split(), *dtype, *flags.split(), "--rehearse-json", str(file)])
    assert pretrain_llama.main() == 0
    return read_rehearsal(str(file))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_predicted_peak_is_the_rehearsed_one(name, monkeypatch, tmp_path):
    found = rehearse(monkeypatch, tmp_path / "r.json", SETTINGS[name])
    prediction = predict(found.job, found.plans)
    tolerance = 0.03 if found.job.on_gpu else 0.01  # a CPU's kernels make fp32 copies of a tile of logits
    assert prediction.device_bytes == pytest.approx(found.peak, rel=tolerance)
    phases = json.loads((tmp_path / "r.json").read_text())["phases"]
    deepest = max(phases, key=lambda phase: phases[phase]["peak"])
    assert prediction.moment in {"between": ("head backward", "embedding backward")}.get(deepest, (deepest,))
    assert found.pairs_share == 1
