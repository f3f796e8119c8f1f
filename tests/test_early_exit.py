"""`--exit-interval` and `--exit-duration-in-mins`: a run that ends early, on all ranks, with a checkpoint that goes on alike."""

import contextlib
import io
import time

import pytest

from tests.distributed import run_distributed
from tests.test_pretrain import MODEL, _main_with_own_group, numbers, records

FLAGS = [*MODEL, "--mock-data", "--lr-decay-iters", 5, "--global-batch-size", 2]


def _main_on_skewed_clocks(rank, world_size, flags, minutes_ahead):
    """What it prints. The clock of rank r seems to have run for `minutes_ahead[r]` more since the start."""
    import pretrain_llama

    class Clock:
        monotonic = staticmethod(lambda: time.monotonic() - 60 * minutes_ahead[rank])

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(pretrain_llama, "time", Clock)
        _main_with_own_group(rank, world_size, [str(flag) for flag in flags])
    return output.getvalue()


def exits(flags, minutes_ahead=(0, 0)):
    """Output of two ranks that exit with 0."""
    return "".join(run_distributed(_main_on_skewed_clocks, 2, flags, minutes_ahead))


def steps(log):
    return [record["step"] for record in records(log)]


def test_a_run_in_portions_is_the_run_in_one(tmp_path):
    saved = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--ckpt-keep", 9, "--exit-interval", 2]
    flags = [*FLAGS, "--context-parallel-size", 2, "--train-iters", 4, "--eval-interval", 2, "--eval-iters", 1]
    assert "stopped" not in exits([*flags, "--log-jsonl", tmp_path / "straight"])
    output = exits([*flags, *saved, "--log-jsonl", tmp_path / "log"])
    way_on = f"saved in {tmp_path / 'ckpt'}; --load {tmp_path / 'ckpt'} goes on from there"
    assert output.count(f"--exit-interval 2: stopped after step 2, {way_on}\n") == 1
    assert steps(tmp_path / "log") == [1, 2] and steps(tmp_path / "log.valid") == [2], "the evaluation that was due came first"
    assert "stopped" not in exits([*flags, *saved, "--log-jsonl", tmp_path / "log"]), "the last step ends the run as ever"
    assert numbers(tmp_path / "log") == numbers(tmp_path / "straight") and steps(tmp_path / "log.valid") == [2, 4]
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("iter_*")) == ["iter_0000002", "iter_0000004"]


@pytest.mark.parametrize("minutes_ahead", [(0, 31), (31, 0)])
def test_the_first_rank_whose_time_is_up_ends_the_run_of_all(tmp_path, minutes_ahead):
    """Rank and rank start at different moments, and the step of one may last longer."""
    flags = [*FLAGS, "--train-iters", 5, "--save", tmp_path / "ckpt", "--log-jsonl", tmp_path / "log", "--eval-interval", 1]
    output = exits([*flags, "--exit-duration-in-mins", 30], minutes_ahead)
    assert f"--exit-duration-in-mins 30: stopped after step 1, saved in {tmp_path / 'ckpt'}; --load" in output
    assert steps(tmp_path / "log") == [1] and not (tmp_path / "log.valid").exists(), "nor is there time for an evaluation"
    assert (tmp_path / "ckpt" / "iter_0000001").is_dir()
    exits([*flags, "--load", tmp_path / "ckpt", "--train-iters", 3])
    assert steps(tmp_path / "log") == steps(tmp_path / "log.valid") == [1, 2, 3], "the run that goes on makes up for it"
    exits([*flags, "--load", tmp_path / "ckpt", "--train-iters", 3])
    assert steps(tmp_path / "log.valid") == [1, 2, 3], "nothing is left to do"


def test_a_run_that_saves_nothing_says_so_and_one_in_time_trains_to_its_end(tmp_path):
    output = exits([*FLAGS, "--train-iters", 5, "--exit-interval", 3, "--log-jsonl", tmp_path / "log"])
    assert "--exit-interval 3: stopped after step 3, nothing saved: no --save" in output and steps(tmp_path / "log") == [1, 2, 3]
    output = exits([*FLAGS, "--train-iters", 3, "--exit-duration-in-mins", 30, "--log-jsonl", tmp_path / "in_time"], (29, 0))
    assert "stopped" not in output and steps(tmp_path / "in_time") == [1, 2, 3]
