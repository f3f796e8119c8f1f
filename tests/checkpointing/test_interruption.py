"""Complete or absent: processes are killed, and operations fail, at every step of a save.

The saved state here is one number, in all weights and in the trainer state. `keep` is 1 throughout: the case in
which a wrong order of removal and renaming would leave nothing. `test_folder` kills at every single operation on
the directory; here whole ranks die at random moments.
"""

import os
import random
import resource
import shutil
import subprocess
import threading
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from megacp.checkpointing.distributed import CheckpointError, latest_iteration, load_checkpoint, save_checkpoint
from tests.checkpointing.faults import FileFault, die, raise_no_space
from tests.distributed import RankFailure, run_distributed
from tests.training.sharded_model import adamw, sharded_model, train_step

SAME_ITERATION = 77


def trained():
    model = sharded_model(hidden=8, num_layers=1)
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    return model, optimizer


def save(directory, number, model, optimizer, again):
    """Under iteration `number`, or `again` under the same iteration as before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    iteration = SAME_ITERATION if again else number
    save_checkpoint(directory, iteration, model, optimizer, {"number": number}, keep=1)


def load(directory, model, optimizer) -> int:
    number = load_checkpoint(directory, model, optimizer)["number"]
    for parameter in model.parameters():
        assert (parameter.to_local() == number).all()
    return number


def load_then_save_until_killed(rank, world_size, directory, doomed_rank, saves):
    """`doomed_rank` dies after one save and then the time that `saves` more take, in the middle of something."""
    model, optimizer = trained()
    number = load(directory, model, optimizer) if latest_iteration(directory) is not None else 0
    started = time.monotonic()
    save(directory, number + 1, model, optimizer, again=False)
    if rank == doomed_rank:
        (directory / "loaded").write_text(str(number))
        threading.Timer(saves * (time.monotonic() - started), die).start()
    for later in range(number + 2, number + 1000):
        save(directory, later, model, optimizer, again=later % 3 == 0)


def test_killed_at_random_moments(tmp_path):
    generator = random.Random(0)
    numbers = []
    for attempt in range(10):
        started = time.monotonic()
        with pytest.raises(RankFailure, match="died with exit code -9"):
            run_distributed(load_then_save_until_killed, 2, tmp_path, attempt % 2, generator.uniform(0.0, 3.0), timeout=60)
        assert time.monotonic() - started < 50  # the surviving rank did not wait
        numbers.append(int((tmp_path / "loaded").read_text()))
    assert all(before < after for before, after in pairwise(numbers))  # each found all that the one before had saved


def fail_at_each_operation(rank, world_size, directory, failing_rank, for_good):
    """Messages of the saves that failed. Each save has a later operation of `failing_rank` fail, up to the last."""
    model, optimizer = trained()
    good = 1
    save(directory, good, model, optimizer, again=False)
    fault = FileFault()
    messages = []
    for operation in range(1, 100):
        number = 1 + operation
        if rank == failing_rank:
            fault.arm(operation, raise_no_space, for_good)
        failed = False
        try:
            save(directory, number, model, optimizer, again=False)
        except CheckpointError as error:
            failed = True
            messages.append(str(error))
        happened = torch.tensor(rank == failing_rank and fault.disarm())
        assert for_good or not (directory / f"iter_{number:07}.incomplete").exists(), "a partial folder stays"
        newest = latest_iteration(directory)
        assert newest == number or failed and newest == good
        assert load(directory, model, optimizer) == newest
        good = newest
        dist.all_reduce(happened, op=dist.ReduceOp.MAX)
        if not happened:
            return messages
    raise AssertionError("a save has no 100 operations")


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failing_operation_is_raised_on_all_ranks_and_loses_nothing(tmp_path, failing_rank, for_good):
    messages, others = run_distributed(fail_at_each_operation, 2, tmp_path, failing_rank, for_good)
    assert messages == others and len(messages) >= (10 if failing_rank == 0 else 1)
    for message in messages:
        assert message.startswith(f"--save {tmp_path}: iter_")
        assert f"rank {failing_rank}: OSError: [Errno 28] No space left on device" in message
        assert "is intact" in message
        assert for_good or "could not be removed" not in message
    assert for_good or any("The partial folder was removed" in message for message in messages)
    assert not for_good or failing_rank == 1 or any("could not be removed" in message for message in messages)


def save_past_a_limit(rank, world_size, directory):
    """Rank 1 cannot write files of more than 20,000 bytes: it fails in the middle of its data."""
    model = sharded_model(width=64, hidden=300)
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    save_checkpoint(directory, 1, model, optimizer, {})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(directory, 2, model, optimizer, {})
    load_checkpoint(directory, model, optimizer, 1)
    return str(error.value)


def test_failing_in_the_middle_of_a_file_names_the_systems_error(tmp_path):
    for message in run_distributed(save_past_a_limit, 2, tmp_path):
        for part in (f"--save {tmp_path}", "iter_0000002", "rank 1: OSError: [Errno 27]", "needs", "were free"):
            assert part in message
        assert message.endswith("The partial folder was removed. The last good checkpoint, iter_0000001, is intact")
    assert not (tmp_path / "iter_0000002.incomplete").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Two MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def save_what_does_not_fit(rank, world_size, directory, free):
    """`free` bytes are what the system claims; None leaves it to say the truth."""
    model, optimizer = trained()
    save_checkpoint(directory, 1, model, optimizer, {})
    model = sharded_model(width=256, hidden=1024, num_layers=1)
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    usage = shutil.disk_usage
    if free is not None:
        shutil.disk_usage = lambda path: usage(path)._replace(free=free)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(directory, 2, model, optimizer, {})
    shutil.disk_usage = usage
    model, optimizer = trained()
    load_checkpoint(directory, model, optimizer)
    return str(error.value)


@pytest.mark.parametrize("claimed", [None, 2**40])
def test_full_disk(small_disk, claimed):
    """Found out before anything is written; or in the middle, when another writer was faster."""
    first, second = run_distributed(save_what_does_not_fit, 2, small_disk, claimed)
    assert first == second
    reason = "too little space before anything was written" if claimed is None else "[Errno 28] No space left on device"
    for part in (f"--save {small_disk}: iter_0000002 was not saved", reason, "It needs", "MiB", "were free"):
        assert part in first
    assert first.endswith("The partial folder was removed. The last good checkpoint, iter_0000001, is intact")
    assert sorted(path.name for path in small_disk.iterdir() if path.is_dir()) == ["iter_0000001"]


def first_save_message(rank, world_size, directory, trainer_state):
    model, optimizer = trained()
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(directory, 1, model, optimizer, trainer_state)
    return str(error.value)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for message in run_distributed(first_save_message, 2, tmp_path / "file" / "ckpt", {}):
        assert f"--save {tmp_path / 'file' / 'ckpt'}" in message and "rank 0: NotADirectoryError" in message
        assert message.endswith("There is no earlier checkpoint in this directory")


def test_a_trainer_state_that_json_cannot_hold(tmp_path):
    for message in run_distributed(first_save_message, 2, tmp_path, {"x": {1, 2}}):
        assert "TypeError: Object of type set is not JSON serializable" in message
    assert list(tmp_path.iterdir()) == []


def warned_save(rank, world_size, directory):
    model, optimizer = trained()
    save_checkpoint(directory, 1, model, optimizer, {}, keep=1)
    rmtree = shutil.rmtree
    shutil.rmtree = lambda path: (_ for _ in ()).throw(PermissionError(f"cannot remove {path}"))
    if rank == 0:
        with pytest.warns(UserWarning, match="old checkpoint could not be removed: cannot remove .*iter_0000001"):
            save_checkpoint(directory, 2, model, optimizer, {}, keep=1)
    else:
        save_checkpoint(directory, 2, model, optimizer, {}, keep=1)
    shutil.rmtree = rmtree


def test_an_old_checkpoint_that_cannot_be_removed_is_only_a_warning(tmp_path):
    run_distributed(warned_save, 2, tmp_path)
    assert latest_iteration(tmp_path) == 2
