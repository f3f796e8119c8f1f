"""Two runs do not save into one folder, and a run that was killed stands in nobody's way."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from megacp.argument_checks import ArgumentError
from megacp.training.save_lock import NAME, lock_save

HOLD = "import sys, time; from pathlib import Path; from megacp.training.save_lock import lock_save; lock = lock_save(Path(sys.argv[1]))"


def holder(folder):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", f"{HOLD}; print(flush=True); time.sleep(100)", folder], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_a_second_run_is_told_which_the_first_is_and_a_killed_one_frees_the_folder(tmp_path, capfd):
    with holder(tmp_path / "ckpt") as other:
        with pytest.raises(ArgumentError) as refused:
            lock_save(tmp_path / "ckpt", wait_s=0.1)
        for words in (f"--save {tmp_path / 'ckpt'}", f"process {other.pid} on {os.uname().nodename}", f"rm {tmp_path / 'ckpt' / NAME}"):
            assert words in str(refused.value)
        assert "waiting up to 0 s for process" in capfd.readouterr().out
        other.send_signal(signal.SIGKILL)
    lock_save(tmp_path / "ckpt", wait_s=0).close()


def test_a_run_that_is_ending_is_waited_for(tmp_path):
    with holder(tmp_path) as other:
        started = time.monotonic()
        subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1.5); os.kill({other.pid}, 9)"])
        lock = lock_save(tmp_path, wait_s=30)
        assert time.monotonic() - started > 1
        assert (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} on "), "the new one's, not the old one's beside it"
        lock.close()


def test_with_the_file_removed_the_folder_is_free(tmp_path):
    with holder(tmp_path) as other:
        (tmp_path / NAME).unlink()
        lock = lock_save(tmp_path, wait_s=0)
        assert lock is not None
        with pytest.raises(ArgumentError, match=f"process {os.getpid()} on"):
            lock_save(tmp_path, wait_s=0.1)
        lock.close()
        other.kill()


def test_a_file_removed_at_the_last_moment_is_not_what_is_held(tmp_path, monkeypatch):
    """A lock on a file that has lost its name would keep nobody out."""
    original, calls = fcntl.flock, []

    def flock(file, operation):
        if not calls:
            (tmp_path / NAME).unlink()
        calls.append(operation)
        original(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = lock_save(tmp_path, wait_s=0)
    assert len(calls) == 2
    with pytest.raises(ArgumentError):
        lock_save(tmp_path, wait_s=0)
    lock.close()


def test_without_locks_the_run_goes_on_and_another_error_is_told(tmp_path, monkeypatch):
    def failing(number):
        def flock(file, operation):
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    assert lock_save(tmp_path) is None
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        lock_save(tmp_path)
