"""`pretrain_llama.py` as its users run it: whole runs in processes of their own, resumed, signalled, and fed bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megacp.argument_checks import ArgumentError
from megacp.data.indexed_dataset import IndexedDatasetBuilder
from megacp.training.save_lock import lock_save
from tests.distributed import run_distributed

ROOT = Path(__file__).parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --kv-channels 8 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 258 --seq-length 128 --lr 1e-2 --lr-warmup-iters 2 --device cpu --fp32"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of a small dataset of bytes: 60 documents of 1 to 200 tokens."""
    prefix = tmp_path_factory.mktemp("data") / "bytes"
    lengths = np.random.default_rng(0).integers(1, 200, 60)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number, length in enumerate(lengths):
            builder.add_document(np.append(np.arange(length - 1) * (number % 7 + 1) % 256, 257))
        builder.finalize()
    return ["--data-path", str(prefix), "--tokenizer-type", "Byte", "--split", "1,0,0"]


def _main(rank, world_size, flags):
    import pretrain_llama

    sys.argv = ["pretrain_llama.py", *flags]
    assert pretrain_llama.main() == 0


def train(flags, ranks=1):
    """Runs the entry point on `ranks` processes. They bring no default group: the entry point makes its own."""
    run_distributed(_main_with_own_group, ranks, [str(flag) for flag in flags])


def _main_with_own_group(rank, world_size, flags):
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    original = dist.init_process_group
    dist.init_process_group = lambda backend, timeout: original(backend, store=dist.PrefixStore("main", store), rank=rank, world_size=world_size)
    try:
        _main(rank, world_size, flags)
    finally:
        dist.init_process_group = original


def records(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def numbers(log):
    """What must be equal bit by bit: JSON holds the shortest text that gives the same float back."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["valid_tokens"]) for r in records(log)]


def run(flags, **kwargs):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | kwargs.pop("env", {})
    return subprocess.run(
        [sys.executable, "pretrain_llama.py", *map(str, flags)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_twenty_steps_equal_ten_and_ten_and_a_resume_on_another_layout_goes_on_alike(data, tmp_path):
    flags = [*MODEL, *data, "--lr-decay-iters", 20, "--global-batch-size", 2]
    two_ranks = [*flags, "--context-parallel-size", 2]
    train([*two_ranks, "--train-iters", 20, "--log-jsonl", tmp_path / "straight"], ranks=2)
    for stop in (10, 15, 20):  # resumed twice
        train([*two_ranks, "--train-iters", stop, "--log-jsonl", tmp_path / "resumed", "--save", tmp_path / "ckpt",
               "--load", tmp_path / "ckpt", "--ckpt-keep", 9], ranks=2)  # fmt: skip
    straight = numbers(tmp_path / "straight")
    assert [step for step, *_ in straight] == list(range(1, 21))
    assert numbers(tmp_path / "resumed") == straight

    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("15")
    for name in ("iter_0000020",):
        os.rename(tmp_path / "ckpt" / name, tmp_path / name)
    train([*flags, "--train-iters", 20, "--load", tmp_path / "ckpt", "--log-jsonl", tmp_path / "other"], ranks=2)  # data 2
    other = records(tmp_path / "other")
    assert [r["step"] for r in other] == list(range(16, 21))
    assert [r["loss"] for r in other] == pytest.approx([loss for _, loss, *_ in straight[15:]], rel=1e-4)


def test_sigterm_saves_after_the_step_and_exits_0(data, tmp_path):
    log = tmp_path / "log"
    flags = [*MODEL, *data, "--train-iters", 100000, "--save", tmp_path / "ckpt", "--log-jsonl", log]
    process = subprocess.Popen(
        [sys.executable, "pretrain_llama.py", *map(str, flags)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(ArgumentError, match=f"--save {tmp_path / 'ckpt'} is being saved into by process {process.pid} on"):
        lock_save(tmp_path / "ckpt", wait_s=0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    lock_save(tmp_path / "ckpt", wait_s=0).close()
    last = records(log)[-1]["step"]
    assert process.returncode == 0
    assert f"SIGTERM: stopped after step {last}" in output
    assert (tmp_path / "ckpt" / f"iter_{last:07}").is_dir()


def test_a_folder_that_another_run_saved_into_while_this_one_waited_is_looked_at_again(data, tmp_path):
    flags = [*MODEL, *data, "--train-iters", 3]
    assert run([*flags, "--save", tmp_path / "other"]).returncode == 0
    lock = lock_save(tmp_path / "ckpt")
    command = [sys.executable, "pretrain_llama.py", *map(str, flags), "--save", str(tmp_path / "ckpt")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        for line in waiting.stdout:
            if line.startswith("waiting up to 60 s for process"):
                break
        shutil.copytree(tmp_path / "other" / "iter_0000003", tmp_path / "ckpt" / "iter_0000003")
        lock.close()
        _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 2 and f"--save {tmp_path / 'ckpt'} holds checkpoints up to step 3" in errors


def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_samples(data, tmp_path):
    flags = [*MODEL, *data, "--train-iters", 10, "--save", tmp_path / "ckpt", "--save-interval", 1, "--lr", 1e30, "--lr-warmup-iters", 0]
    done = run(flags)
    assert done.returncode == 1
    match = re.search(r"error: (loss|grad norm).* at step (\d+) \(consumed samples (\d+), sample indices (\d+)\)", done.stderr)
    assert match, done.stderr
    assert int(match[3]) == int(match[4]) == int(match[2]) - 1
    saved = sorted(path.name for path in (tmp_path / "ckpt").glob("iter_*"))
    assert saved and saved[-1] == f"iter_{int(match[2]) - 1:07}", "the step that broke is not saved"


BAD_INPUT = {
    "unknown preset": (["--model", "llama3-9b", "--mock-data"], "llama3-8b"),
    "context size and heads": (["--model", "llama3-8b", "--context-parallel-size", "12", "--mock-data"], "--context-parallel-size 12"),
    "sequence length": (["--seq-length", "1001", "--context-parallel-size", "2", "--mock-data"], "--seq-length 1001"),
    "pipeline": (["--pipeline-model-parallel-size", "2", "--mock-data"], "--pipeline-model-parallel-size 2"),
    "no data": ([], "--data-path"),
    "missing data": (["--data-path", "/nowhere/x", "--tokenizer-type", "Byte", "--vocab-size", "258"], "/nowhere/x"),
    "backend": (["--attention-backend", "fa4", "--device", "cpu", "--mock-data"], "--attention-backend fa4"),
    "host memory": (
        "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --activation-memory host --host-memory-gib 9 --mock-data".split(),
        "--host-memory-gib 9",
    ),
    "not a number": (["--lr", "fast", "--mock-data"], "--lr"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_made(case, monkeypatch, capsys):
    import pretrain_llama

    flags, named = BAD_INPUT[case]
    monkeypatch.setenv("WORLD_SIZE", "24")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *flags])
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("a process group was made"))
    try:
        code = pretrain_llama.main()
    except SystemExit as usage:  # argparse's own
        code = usage.code
    assert code == 2
    error = capsys.readouterr().err
    assert named in error and "Traceback" not in error


def test_a_token_outside_the_vocabulary_is_named_with_its_file(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "wide", np.uint16) as builder:
        builder.add_document(np.full(2000, 300))
        builder.finalize()
    done = run([*MODEL, "--data-path", tmp_path / "wide", "--tokenizer-type", "Byte", "--split", "1,0,0", "--train-iters", 4])
    assert done.returncode == 2
    assert "token id 300" in done.stderr and "wide" in done.stderr and "--vocab-size 301" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_does_not_save_over_what_it_did_not_load_and_says_when_nothing_is_left(data, tmp_path):
    flags = [*MODEL, *data, "--train-iters", 3, "--save", tmp_path / "ckpt", "--log-jsonl", tmp_path / "log"]
    assert run(flags).returncode == 0
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = run([*flags, "--num-layers", 1])
    assert other.returncode == 2 and f"--save {tmp_path / 'ckpt'}" in other.stderr and "Traceback" not in other.stderr
    again = run([*flags, "--load", tmp_path / "ckpt"])
    assert again.returncode == 0 and "nothing left to train: --train-iters 3" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("iter_*/*")}.items() <= saved.items()
    assert len(records(tmp_path / "log")) == 3


def test_unreadable_data_in_mid_run_ends_it_with_what_was_trained_saved(tmp_path):
    """Every document but one is fine; the samples before it are trained on, and kept."""
    with IndexedDatasetBuilder(tmp_path / "mostly", np.uint16) as builder:
        for number in range(12):
            builder.add_document(np.full(400, 300 if number == 7 else number))
        builder.finalize()
    flags = [*MODEL, "--data-path", tmp_path / "mostly", "--tokenizer-type", "Byte", "--split", "1,0,0", "--train-iters", 40,
             "--save", tmp_path / "ckpt", "--log-jsonl", tmp_path / "log", "--seed", 4]  # fmt: skip
    done = run(flags)
    trained = records(tmp_path / "log")[-1]["step"]
    assert done.returncode == 2
    assert f"step {trained + 1} not begun" in done.stderr and "token id 300" in done.stderr
    assert (tmp_path / "ckpt" / f"iter_{trained:07}").is_dir()


def test_a_resumed_run_says_when_its_data_is_no_longer_the_same(data, tmp_path):
    def dataset(length):
        with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
            builder.add_document(np.arange(length) % 250)
            builder.finalize()

    dataset(9000)
    flags = [*MODEL, "--data-path", tmp_path / "text", "--tokenizer-type", "Byte", "--split", "1,0,0", "--train-iters", 6,
             "--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--exit-interval"]  # fmt: skip
    assert run([*flags, 3]).returncode == 0
    unchanged = run([*flags, 4])
    assert "step 3, 3 samples consumed" in unchanged.stdout and "warning" not in unchanged.stdout
    dataset(9001)
    other = run([*flags, 5, "--attention-mask", "causal"])
    assert other.returncode == 0
    assert f"warning: --data-path {tmp_path / 'text'} does not hold what it held when the checkpoint was saved: the run goes on at sample 4 of" in other.stdout
    assert "warning: --attention-mask was document, is causal from here on" in other.stdout
    other = run([*flags, 6, "--attention-mask", "causal"])
    assert other.returncode == 0 and "warning" not in other.stdout, "told once: it is this run's own data now"


def test_a_dataset_truncated_under_a_run_ends_it_likewise(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "long", np.uint16) as builder:
        for number in range(400):
            builder.add_document(np.full(100 * 128, number % 250))
        builder.finalize()
    log = tmp_path / "log"
    flags = [*MODEL, "--data-path", tmp_path / "long", "--tokenizer-type", "Byte", "--split", "1,0,0", "--train-iters", 30000,
             "--save", tmp_path / "ckpt", "--log-jsonl", log]  # fmt: skip
    with subprocess.Popen([sys.executable, "pretrain_llama.py", *map(str, flags)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (log.exists() and len(log.read_text().splitlines()) > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.truncate(tmp_path / "long.bin", 1000)
        _, errors = process.communicate(timeout=60)
    trained = records(log)[-1]["step"]
    assert process.returncode == 2 and f"step {trained + 1} not begun" in errors and "long.bin now ends before byte" in errors
    assert (tmp_path / "ckpt" / f"iter_{trained:07}").is_dir()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_refused_by_name(data, tmp_path, damage):
    flags = [*MODEL, *data, "--train-iters", 3, "--save", tmp_path / "ckpt"]
    assert run(flags).returncode == 0
    victim = max((tmp_path / "ckpt" / "iter_0000003").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content if damage == "flip" else content[:-100])
    done = run([*flags, "--load", tmp_path / "ckpt"])
    assert done.returncode == 1
    assert "--load" in done.stderr and victim.name in done.stderr and "Traceback" not in done.stderr


def test_examples_pass_a_dry_run(data, tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<|end_of_text|>": 0, "a": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<|end_of_text|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prefix = tmp_path / "long"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document(np.zeros(3 * 2**20, dtype=np.uint16))
        builder.finalize()
    for script, world_size in (("pretrain_llama3_8b_8gpu.sh", 8), ("pretrain_llama3_8b_2nodes.slurm", 16)):
        environment = os.environ | dict(
            LAUNCHER=sys.executable, WORLD_SIZE=str(world_size), DATA=str(prefix), TOKENIZER=str(tmp_path / "tokenizer.json"),
            OUT=str(tmp_path / "out"),
        )  # fmt: skip
        command = ["bash", f"examples/{script}", "--dry-run", "--split", "1,0,0"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"rank 0 of {world_size}" in done.stdout and "llama3-8b, 8,030.3 million parameters" in done.stdout
    assert not (tmp_path / "out").exists()
