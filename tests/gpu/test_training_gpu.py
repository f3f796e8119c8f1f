"""Training on the GPUs that are there, through NCCL: layouts agree, the loss falls, a fast backend is taken."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


BATCH = f"--global-batch-size {max(4, GPUS)}"
FP32 = f"--fp32 --attention-backend reference {BATCH}"
BF16 = f"--bf16 --context-parallel-size {GPUS} {BATCH}"
EVALUATING = f"{FP32} --context-parallel-size {GPUS} --activation-memory lean --eval-interval 5"


def train(folder, ranks, flags):
    """Losses of a run, and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "pretrain_llama.py"]
    command += f"{MODEL} --train-iters 10 --log-jsonl {folder}/log {flags}".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in (folder / "log").read_text().splitlines()], done.stdout


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """By flags, what `train` gave on all GPUs, and of `None` on one. Several at a time: they start longer than they train."""
    tests = [item for item in request.session.items if item.path == request.path]
    asked = [test.callspec.params["flags"] for test in tests]
    jobs = {None: (1, f"{FP32} --cp-comm-type a2a")} | {flags: (GPUS, flags) for flags in asked}
    with ThreadPoolExecutor(max(1, min(6, os.cpu_count() // (2 * GPUS)))) as pool:
        started = {name: pool.submit(train, tmp_path_factory.mktemp("run"), *job) for name, job in jobs.items()}
        yield lambda flags: started[flags].result()
        for run in started.values():
            run.cancel()


def layouts():
    """Flags of layouts that use all GPUs: all context, all data, and between, a2a and every U."""
    sizes = [c for c in (1, 2, 4, 8) if c <= GPUS and GPUS % c == 0]
    for context in sizes:
        batch = f"{FP32} --context-parallel-size {context}"
        yield f"{batch} --cp-comm-type a2a"
        for heads in (1, 2, 4, 8):
            if heads % context == 0:
                yield f"{batch} --cp-comm-type upipe --upipe-heads-per-stage {heads}"


@pytest.mark.parametrize("flags", list(layouts()), ids=lambda flags: flags.removeprefix(FP32).strip())
def test_float32_losses_do_not_depend_on_the_layout(flags, runs):
    assert runs(flags)[0] == pytest.approx(runs(None)[0], rel=1e-4)


@pytest.mark.parametrize("flags", [BF16], ids=["bf16"])
def test_bfloat16_training_takes_a_fast_backend_and_learns(flags, runs):
    losses, output = runs(flags)
    assert re.search(r"attention +(fa4|fa3|cudnn|torch):", output), output
    assert losses[-1] < losses[0] - 0.2
    # bf16 rounds the weights and activations by 0.2%; over ten steps from the same start the curves stay together.
    assert losses == pytest.approx(runs(None)[0], rel=0.02)


@pytest.mark.parametrize("flags", [EVALUATING], ids=["lean"])
def test_evaluation_leaves_training_as_it_is(flags, runs):
    losses, output = runs(flags)
    assert losses == pytest.approx(runs(None)[0], rel=1e-4)
    early, late = (float(loss) for loss in re.findall(r"^eval +\d+/10 \| loss +(\S+) \| 0-32K +\S+ \| ", output, re.MULTILINE))
    assert late < early < losses[0]
