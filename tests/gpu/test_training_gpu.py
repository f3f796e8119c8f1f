"""Training on the GPUs that are there, through NCCL: layouts agree, the loss falls, a fast backend is taken."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
MODEL = (
    "--model llama-tiny --hidden-size 512 --kv-channels 64 --ffn-hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 "
    "--mock-data --seq-length 8192 --lr 1e-3 --lr-warmup-iters 2"
)


def train(folder, ranks, flags, iterations=10):
    """Losses of a run, and what it printed."""
    log = folder / f"{abs(hash((ranks, flags)))}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "pretrain_llama.py"]
    command += f"{MODEL} --train-iters {iterations} --log-jsonl {log} {flags}".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()], done.stdout


def layouts():
    """Flags of layouts that use all GPUs: all context, all data, and between, a2a and every U."""
    sizes = [c for c in (1, 2, 4, 8) if c <= GPUS and GPUS % c == 0]
    for context in sizes:
        batch = f"--context-parallel-size {context} --global-batch-size {max(4, GPUS)}"
        yield f"{batch} --cp-comm-type a2a"
        for heads in (1, 2, 4, 8):
            if heads % context == 0:
                yield f"{batch} --cp-comm-type upipe --upipe-heads-per-stage {heads}"


@pytest.fixture(scope="module")
def one_gpu_losses(tmp_path_factory):
    flags = f"--fp32 --attention-backend reference --cp-comm-type a2a --global-batch-size {max(4, GPUS)}"
    return train(tmp_path_factory.mktemp("one"), 1, flags)[0]


@pytest.mark.parametrize("flags", list(layouts()))
def test_float32_losses_do_not_depend_on_the_layout(flags, one_gpu_losses, tmp_path):
    losses, _ = train(tmp_path, GPUS, f"--fp32 --attention-backend reference {flags}")
    assert losses == pytest.approx(one_gpu_losses, rel=1e-4)


def test_bfloat16_training_takes_a_fast_backend_and_learns(one_gpu_losses, tmp_path):
    flags = f"--bf16 --context-parallel-size {GPUS} --global-batch-size {max(4, GPUS)}"
    losses, output = train(tmp_path, GPUS, flags)
    assert re.search(r"attention +(fa4|fa3|cudnn|torch):", output), output
    assert losses[-1] < losses[0] - 0.2
    # bf16 rounds the weights and activations by 0.2%; over ten steps from the same start the curves stay together.
    assert losses == pytest.approx(one_gpu_losses, rel=0.02)


def test_evaluation_leaves_training_as_it_is(one_gpu_losses, tmp_path):
    flags = f"--fp32 --attention-backend reference --context-parallel-size {GPUS} --global-batch-size {max(4, GPUS)}"
    losses, output = train(tmp_path, GPUS, f"{flags} --activation-memory lean --eval-interval 5")
    assert losses == pytest.approx(one_gpu_losses, rel=1e-4)
    early, late = (float(loss) for loss in re.findall(r"^eval +\d+/10 \| loss +(\S+) \| 0-32K +\S+ \| ", output, re.MULTILINE))
    assert late < early < losses[0]
