"""Which folder is the newest, and what is kept, whatever killed runs, other programs and people left there."""

import os
from itertools import pairwise

import pytest

from megacp.checkpointing import folder
from megacp.checkpointing.distributed import CheckpointError, latest_iteration
from megacp.checkpointing.folder import DamagedFile, Manifest
from tests.checkpointing.faults import FileFault, die
from tests.distributed import run_distributed

EACH = [10, 20, 30, 40]


def save(directory, iteration, contents="weights", keep=None):
    working = folder.begin(directory, iteration)
    (working / "data").write_text(contents)
    final = folder.publish(directory, Manifest(iteration, 1, {"data": folder.record_file(working / "data")}))
    folder.prune(directory, keep, iteration)
    return final


def folders(directory):
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_nothing_saved(tmp_path):
    assert latest_iteration(tmp_path) is None
    assert latest_iteration(tmp_path / "absent") is None


def test_save_is_named_and_tracked_as_in_megatron(tmp_path):
    final = save(tmp_path, 10)
    assert final.name == "iter_0000010" and (final / "data").read_text() == "weights"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    assert latest_iteration(tmp_path) == 10
    assert Manifest.read(final).files["data"].bytes == len("weights")


@pytest.mark.parametrize("tracker", ["10", "30", "nonsense", None])
def test_the_newest_complete_folder_wins_over_a_stale_tracker(tmp_path, tracker):
    save(tmp_path, 10)
    save(tmp_path, 20)
    path = tmp_path / folder.TRACKER
    path.unlink() if tracker is None else path.write_text(tracker)
    assert latest_iteration(tmp_path) == 20


def test_folders_that_do_not_count(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20).rename(tmp_path / "iter_0000020.incomplete")
    (tmp_path / "iter_0000030").mkdir()  # another program's
    (tmp_path / "iter_0000040").write_text("a file")
    save(tmp_path, 50).rename(tmp_path / "copy of iter_0000050")
    assert latest_iteration(tmp_path) == 10


def test_tracker_without_any_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    (tmp_path / folder.TRACKER).write_text("5000")
    with pytest.raises(CheckpointError, match="--load .*latest_checkpointed_iteration.txt"):
        latest_iteration(tmp_path)


def test_a_run_that_went_back_goes_on_from_its_own_save(tmp_path):
    for iteration in (10, 20, 30, 15):
        save(tmp_path, iteration)
    assert latest_iteration(tmp_path) == 15
    save(tmp_path, 25, keep=2)
    assert folders(tmp_path) == ["iter_0000015", "iter_0000025"]


@pytest.mark.parametrize(("keep", "left"), [(1, [40]), (2, [30, 40]), (4, EACH), (9, EACH), (0, EACH), (None, EACH)])
def test_keep(tmp_path, keep, left):
    for iteration in EACH:
        save(tmp_path, iteration, keep=keep)
    assert folders(tmp_path) == [folder.folder_name(iteration) for iteration in left]


def test_what_a_run_went_back_from_goes_first(tmp_path):
    """Gone on from 20: 30 is left behind, though saved later, until this run saves it itself."""
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    for iteration, abandoned, left in [(40, [30], [20, 40]), (50, [30], [40, 50]), (30, [], [30, 50]), (60, [], [30, 60])]:
        save(tmp_path, iteration)
        folder.prune(tmp_path, 2, iteration, abandoned)
        assert folders(tmp_path) == [folder.folder_name(step) for step in left]


def test_a_tracker_that_cannot_be_written_is_worth_a_warning(tmp_path, monkeypatch):
    original = folder.write_durably

    def failing(path, text):
        if path.name == folder.TRACKER:
            raise OSError(28, "No space left on device")
        original(path, text)

    save(tmp_path, 10)
    monkeypatch.setattr(folder, "write_durably", failing)
    with pytest.warns(UserWarning, match=f"{folder.TRACKER} could not be written: No space left on device; iter_0000020 is complete"):
        save(tmp_path, 20)
    assert latest_iteration(tmp_path) == 20


def test_pruning_leaves_what_is_not_a_checkpoint_of_ours(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "notes").mkdir()
    save(tmp_path, 10, keep=1)
    save(tmp_path, 20, keep=1)
    assert folders(tmp_path) == ["iter_0000001", "iter_0000020", "notes"]


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 10, "old")
    final = save(tmp_path, 10, "new")
    assert (final / "data").read_text() == "new"
    assert folders(tmp_path) == ["iter_0000010"]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path):
    save(tmp_path, 10, "old").rename(tmp_path / "iter_0000010.replaced")
    assert latest_iteration(tmp_path) == 10
    assert (folder.complete_checkpoints(tmp_path)[10] / "data").read_text() == "old"
    save(tmp_path, 10, "new")
    assert (folder.complete_checkpoints(tmp_path)[10] / "data").read_text() == "new"
    assert folders(tmp_path) == ["iter_0000010"]


def test_killed_before_the_replaced_folder_was_removed(tmp_path):
    for iteration in range(10, 26):  # many, since the directory's own order decides which of two is seen first
        replaced = save(tmp_path / "elsewhere", iteration, "old")
        current = save(tmp_path / "here", iteration, "new")
        current.rename(tmp_path / current.name)
        replaced.rename(tmp_path / f"iter_{iteration:07d}.replaced")
    newest = [(path / "data").read_text() for path in folder.complete_checkpoints(tmp_path).values()]
    assert newest == ["new"] * 16
    save(tmp_path, 26)
    assert not list(tmp_path.glob("*.replaced"))


def test_leftovers_are_removed_by_the_next_save(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "iter_0000005.incomplete").mkdir()
    (folder.begin(tmp_path, 20) / "half").write_text("x")
    save(tmp_path, 20)
    assert folders(tmp_path) == ["iter_0000010", "iter_0000020"]


def test_another_programs_folder_is_not_overwritten(tmp_path):
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="not a complete checkpoint"):
        save(tmp_path, 10)
    assert (tmp_path / "iter_0000010" / "precious").exists()


@pytest.mark.parametrize("problem", ["missing", "short"])
def test_a_file_that_did_not_arrive_is_not_published(tmp_path, problem):
    working = folder.begin(tmp_path, 10)
    (working / "data").write_text("weights")
    record = folder.record_file(working / "data")
    (working / "data").unlink() if problem == "missing" else (working / "data").write_text("weigh")
    with pytest.raises(OSError, match="data"):
        folder.publish(tmp_path, Manifest(10, 1, {"data": record}))
    assert latest_iteration(tmp_path) is None


def test_verify_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 300)
    record = folder.record_file(path)
    folder.verify_file(path, record)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(DamagedFile, match="data is damaged: its crc32"):
        folder.verify_file(path, record)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="data has 76799 bytes where 76800"):
        folder.verify_file(path, record)
    path.unlink()
    with pytest.raises(DamagedFile, match="data cannot be read"):
        folder.verify_file(path, record)


def test_any_flipped_bit_of_a_manifest_is_noticed_and_does_not_hide_the_checkpoint(tmp_path):
    save(tmp_path, 10)
    path = save(tmp_path, 20) / folder.MANIFEST
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(DamagedFile, match="manifest.json"):
            Manifest.read(path.parent)
        assert latest_iteration(tmp_path) == 20


def newest_contents(directory):
    """Of the newest checkpoint, every file of which must be whole."""
    path = list(folder.complete_checkpoints(directory).values())[-1]
    for name, record in Manifest.read(path).files.items():
        folder.verify_file(path / name, record)
    return (path / "data").read_text()


def saves_killed_at_each_operation(rank, world_size, directory, again):
    """Contents after each of a row of saves, each of which dies one file operation later than the one before."""
    save(directory, 1, "1")
    found = ["1"]
    for operation in range(1, 100):
        contents = str(int(found[-1]) + 1)
        child = os.fork()
        if child == 0:
            FileFault().arm(operation, die)
            save(directory, 1 if again else int(contents), contents, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(newest_contents(directory))
        if status == 0:
            return found, folders(directory)
    raise AssertionError("a save has no 100 operations")


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_each_file_operation(tmp_path, again):
    """Dying early loses the save, dying late does not, and no other is lost, though `keep` is 1."""
    [(found, left)] = run_distributed(saves_killed_at_each_operation, 1, tmp_path, again)
    numbers = [int(contents) for contents in found]
    assert len(numbers) > 12
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))
    assert numbers[1] == 1 and numbers[-1] == numbers[-2] + 1
    assert left == [folder.folder_name(1 if again else numbers[-1])]  # every leftover is gone
