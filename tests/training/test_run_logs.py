"""A run's own log and its rehearsal's own report: the same job, the same documents in the same steps."""

import sys

import pytest

from megacp.argument_checks import ArgumentError
from megacp.training.measured_runs import compared_steps
from megacp.training.rehearsals import read_rehearsal
from megacp.training.run_logs import check_same_job, read_run
from tests.test_pretrain import MODEL, train

FLAGS = [*MODEL, "--mock-data", "--context-parallel-size", 2, "--train-iters", 3, "--lr-warmup-iters", 0, "--mlp-tile-size", 64]


def rehearsed(monkeypatch, file, *flags):
    import pretrain_llama

    given = [*FLAGS, "--rehearse-world-size", 2, "--rehearse-json", file, *flags]
    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *map(str, given)])
    assert pretrain_llama.main() == 0
    return read_rehearsal(str(file))


def test_a_run_and_its_rehearsal_tell_of_one_job_and_of_the_same_documents(monkeypatch, tmp_path):
    log = tmp_path / "run.jsonl"
    saved = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--log-jsonl", log]
    train([*FLAGS, *saved, "--train-iters", 2], ranks=2)
    train([*FLAGS, *saved], ranks=2)
    run, rehearsal = read_run(str(log)), rehearsed(monkeypatch, tmp_path / "r.json")
    assert [step.number for step in run.steps] == [1, 2, 3] and [step.cold for step in run.steps] == [True, False, True]
    assert check_same_job(run, rehearsal) == [] == run.notes
    pairs = [step.attention_pairs for step in rehearsal.steps]
    assert [step.attention_pairs(rehearsal.job.config) for step in run.steps] == pytest.approx(pairs, rel=1e-9)
    assert len(set(pairs)) > 1, "else it does not matter which steps are compared"
    found = compared_steps(run, rehearsal)
    assert found.measured == found.rehearsed == [2] and found.measured_seconds == run.steps[1].seconds
    differs = r"run.jsonl is of a job with mlp_tile_size 64, --rehearsal .*s.json of one with mlp_tile_size 32"
    with pytest.raises(ArgumentError, match=differs):
        check_same_job(run, rehearsed(monkeypatch, tmp_path / "s.json", "--mlp-tile-size", 32))
