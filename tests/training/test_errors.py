"""What a person reads when a run fails: the project's messages plainly, faults of the program with their traceback."""

import importlib
import json
import os

import pytest

from megacp.argument_checks import ArgumentError
from megacp.model.config import preset
from megacp.training import errors
from megacp.training.errors import explain_errors
from megacp.training.metrics import MetricsLogger
from tests.distributed import start_ranks


def told(capsys, action, is_first_rank=True):
    """Exit code and standard error."""
    with explain_errors(is_first_rank) as outcome:
        action()
    return outcome.exit_code, capsys.readouterr().err


def raises(error):
    def action():
        raise error

    return action


def unpacks():
    a, b = (1, 2, 3)


MESSAGES = {
    "a kind of ours": (raises(ArgumentError("--lr 0 is too small; 1e-4 works")), 2, "error: --lr 0 is too small; 1e-4 works\n"),
    "our ValueError": (lambda: preset("gpt-9"), 2, "error: "),
    "ours, from a context manager": (lambda: MetricsLogger(1, jsonl="/dev/null/x"), 2, "error: --log-jsonl /dev/null/x "),
    "a file": (lambda: open("/nowhere/x"), 1, "error: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'\n"),
    "a package": (lambda: importlib.import_module("nosuchthing"), 2, "error: ModuleNotFoundError: No module named 'nosuchthing'\n"),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_what_the_user_can_mend_is_one_line(case, capsys):
    action, exit_code, line = MESSAGES[case]
    code, text = told(capsys, action)
    assert code == exit_code and text.startswith(line) and text.count("\n") == 1


FAULTS = {
    "a line of code": (unpacks, "ValueError: too many values to unpack"),
    "a function of Python's": (lambda: int("x"), "ValueError: invalid literal for int"),
    "a library that raises": (lambda: json.loads("x"), "JSONDecodeError: Expecting value"),
    "a system call without a file": (lambda: os.read(2**20, 1), "OSError: [Errno 9] Bad file descriptor"),
    "a name that is not in a module": (lambda: exec("from json import nosuchthing"), "ImportError: cannot import name"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_the_program_keeps_its_traceback(case, capsys):
    action, line = FAULTS[case]
    code, text = told(capsys, action)
    assert code == 1 and text.startswith("Traceback") and f"\nerror: {line}" in text
    assert "in told\n    action()" in text, "where it came from"


def test_a_rank_with_an_error_of_its_own_tells_it_after_a_while_though_it_is_not_the_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    waited = []
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    code, text = told(capsys, lambda: preset("gpt-9"), is_first_rank=False)
    assert code == 2 and text.startswith("[rank 5] error: ") and "gpt-9" in text
    assert waited == [(errors.SECONDS_TO_SPEAK, "")], "the first rank speaks first"
    _, text = told(capsys, unpacks, is_first_rank=False)
    assert text.startswith("Traceback") and "\n[rank 5] error: ValueError: too many" in text


def finds_a_fault(rank, world_size, folder):
    os.dup2(os.open(folder / f"err{rank}", os.O_CREAT | os.O_WRONLY), 2)
    errors.sys.stderr = os.fdopen(2, "w", closefd=False)
    with explain_errors(rank == 0):
        unpacks()


def test_with_groups_each_rank_shows_its_traceback_and_number(tmp_path):
    _, processes = start_ranks(finds_a_fault, 2, tmp_path)
    for rank, process in enumerate(processes):
        process.join(30)
        assert process.exitcode == 1
        text = (tmp_path / f"err{rank}").read_text()
        assert text.startswith("Traceback") and f"\n[rank {rank}] error: ValueError: too many values" in text
