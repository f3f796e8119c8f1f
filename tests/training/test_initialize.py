"""What a person must know of the launcher before a run of long steps."""

import re

import pytest

from megacp.training.initialize import launcher_notes


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


def test_other_launchers_wait_as_they_are_told(torchrun, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launcher_notes(7200.0) == []
