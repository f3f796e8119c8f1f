"""What a person must know of the launcher before a run of long steps."""

import os
import re

import pytest
import torch

from megacp.training.initialize import check_launch, launcher_notes, limit_notes, select_device, use_deterministic_kernels

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture
def torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def test_steps_longer_than_torchrun_waits_are_said_with_a_time_that_works(torchrun, monkeypatch):
    assert launcher_notes(29.0) == []
    for step_seconds in (31.0, 700.0, 7200.0):
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
        (note,) = launcher_notes(step_seconds)
        assert f"{step_seconds:.0f} s" in note and "30 s after SIGTERM" in note
        advised = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", note)[1]
        assert int(advised) > step_seconds
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", advised)
        assert launcher_notes(step_seconds) == []


def test_an_older_torchrun_is_told_to_wait_in_vain(torchrun, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    (note,) = launcher_notes(700.0)
    assert "30 s after SIGTERM" in note and note.endswith("leaves them time, from torch 2.12 on; this is 2.11.0+cu130")


def test_other_launchers_wait_as_they_are_told(torchrun, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launcher_notes(7200.0) == []


def test_a_limit_that_a_cpu_does_not_hold_is_said():
    assert limit_notes(None, torch.device("cpu")) == limit_notes(0.5, torch.device("cuda", 0)) == []
    (note,) = limit_notes(0.5, torch.device("cpu"))
    assert "--gpu-memory-limit-gib 0.5 holds for GPUs and rehearsals; this run is on a CPU" in note


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables and no others of a launcher."""

    def set_to(text):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for pair in text.split():
            monkeypatch.setenv(*pair.split("="))

    return set_to


@pytest.mark.parametrize(
    "text, named",
    [
        ("WORLD_SIZE=2", "--nproc-per-node 2"),  # would be one rank in a layout for two
        ("SLURM_STEP_NUM_TASKS=8", "--nproc-per-node 8"),  # eight runs of one rank, saving over each other
        ("OMPI_COMM_WORLD_SIZE=4", "--nproc-per-node 4"),
        ("WORLD_SIZE=abc", "WORLD_SIZE=abc"),
        ("WORLD_SIZE=0", "WORLD_SIZE=0"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2"),  # would wait for ever
        ("RANK=0", "WORLD_SIZE is not"),
    ],
)
def test_environments_of_no_launcher_are_refused(environment, text, named):
    environment(text)
    with pytest.raises(ValueError) as error:
        check_launch(alone=False)
    assert text.split()[0] in str(error.value) and named in str(error.value)


@pytest.mark.parametrize("text", ["", "WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=1", "RANK=1 WORLD_SIZE=2",
                                  "RANK=0 WORLD_SIZE=2 SLURM_STEP_NUM_TASKS=2"])  # fmt: skip
def test_launched_ranks_and_single_processes_pass(environment, text):
    environment(text)
    check_launch(alone=False)


def test_a_dry_run_stands_for_any_rank_of_any_job(environment):
    for text in ("WORLD_SIZE=64", "WORLD_SIZE=64 RANK=63", "SLURM_STEP_NUM_TASKS=8"):
        environment(text)
        check_launch(alone=True)
    environment("WORLD_SIZE=64 RANK=64")
    with pytest.raises(ValueError, match="RANK=64"):
        check_launch(alone=True)


def test_a_local_rank_that_is_no_number(environment):
    environment("LOCAL_RANK=x")
    with pytest.raises(ValueError, match="LOCAL_RANK=x"):
        select_device("auto")


@pytest.fixture
def torch_settings():
    """Gives torch's global settings back."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling


def test_deterministic_kernels_have_what_cublas_needs(torch_settings, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # a pass over every buffer


def test_a_cublas_workspace_that_forbids_it_is_named(torch_settings, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ValueError, match="--deterministic: with CUBLAS_WORKSPACE_CONFIG=:0:0 .*:4096:8 or :16:8 works"):
        use_deterministic_kernels()
    assert not torch.are_deterministic_algorithms_enabled()
