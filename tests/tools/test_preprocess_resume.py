"""A killed run goes on where it was, and the result is that of a run that was not killed, to the byte.

The kills are real SIGKILLs of a forked process: at every operation that brings something to the disk, and at random moments.
"""

import functools
import gzip
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest

from megacp.data import document_tasks
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.partial_dataset import PartialDataset
from tools import preprocess_data

FLAGS = ["--tokenizer-type", "Byte", "--append-eod", "--dedup", "--min-tokens", "30", "--write-groups"]
RESULTS = ["x.bin", "x.groups", "x.idx", "x.manifest.json"]


def inputs_in(folder, long_words=250_000):
    """Texts, two of them in parts, and compressed lines, with documents that are empty, short or there twice."""
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"text {i % 9} " * 40 * i)
    for name in ("05long.txt", "08again.txt"):
        (folder / name).write_text("a long é document " * long_words)
    lines = [{"text": f"line {i % 20} " * (i % 10), "n": i} for i in range(200)]
    (folder / "07.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return folder


def preprocess(folder, prefix, checkpoint_seconds=0.0, *flags):
    document_tasks.TASK_BYTES = 2000
    preprocess_data.CHECKPOINT_SECONDS = checkpoint_seconds
    preprocess_data.main(["--input", str(folder), "--output-prefix", str(prefix), *FLAGS, *flags, "--workers", "1"])


def forked(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def results(folder):
    assert sorted(os.listdir(folder)) == RESULTS, sorted(os.listdir(folder))
    return {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The inputs, and the files of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    inputs = inputs_in(folder / "in")
    assert run_to_end(inputs, folder / "out/x") == 0
    counts = json.loads((folder / "out/x.manifest.json").read_text())["counts"]
    assert all(counts[reason] > 1 for reason in ("documents", "empty", "too_short", "duplicate"))
    assert counts["duplicate_tokens"] > 4_000_000  # the long one, which was in the file before it was known
    return inputs, results(folder / "out")


def run_to_end(inputs, prefix, checkpoint_seconds=0.0):
    process = forked(preprocess, inputs, prefix, checkpoint_seconds)
    process.join()
    return process.exitcode


def killed_at(number, function, *arguments):
    """In a forked process: SIGKILL before the `number`th call that syncs, renames or removes a file."""
    left = number

    def counted(call, *args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, functools.partial(counted, getattr(os, name)))
    function(*arguments)


def test_killed_at_any_operation_on_files(wanted, tmp_path):
    """Each run is killed after a few more operations, most before they have come much further than the one before."""
    inputs, files = wanted
    draw, kills = random.Random(1), 0
    for out in (tmp_path / "out1", tmp_path / "out2", tmp_path / "out3"):
        while True:
            process = forked(killed_at, draw.randrange(1, draw.choice([6, 12, 40])), preprocess, inputs, out / "x")
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            kills += 1
            assert not (out / "x.idx").exists() or (out / "x.idx").read_bytes() == files["x.idx"]
        assert results(out) == files
    assert kills >= 20


def test_killed_at_every_step_of_the_end(tmp_path):
    """While the files get their names there must never be an index with other tokens, and every later run finishes."""
    inputs = inputs_in(tmp_path / "in", long_words=1)
    assert run_to_end(inputs, tmp_path / "whole/x") == 0
    files, operations = results(tmp_path / "whole"), 0
    for number in range(200):
        out = tmp_path / f"out{number}"
        out.mkdir()
        for name, content in {"x.idx": b"old", "x.bin": b"old", "x.manifest.json": b"old", "x.groups": b"old"}.items():
            (out / name).write_bytes(content)
        process = forked(killed_in_publish, number, inputs, out / "x")
        process.join()
        if (out / "x.idx").exists() and (out / "x.bin").read_bytes() != b"old":
            assert (out / "x.idx").read_bytes() == files["x.idx"] and (out / "x.bin").read_bytes() == files["x.bin"]
        if process.exitcode == 0:
            break
        operations += 1
        assert run_to_end(inputs, out / "x", 60.0) == 0 and results(out) == files
    assert operations > 10


def killed_in_publish(number, inputs, prefix):
    publish = PartialDataset.publish
    PartialDataset.publish = lambda *args: killed_at(number, publish_and_keep, publish, *args) or publish_and_keep.manifest
    preprocess(inputs, prefix, 60.0, "--restart")


def publish_and_keep(publish, *args):
    publish_and_keep.manifest = publish(*args)


def test_killed_at_random_moments(wanted, tmp_path):
    inputs, files = wanted
    draw, kills = random.Random(2), 0
    for attempt in range(200):
        process = forked(preprocess, inputs, tmp_path / "out/x")
        if attempt < 20:
            time.sleep(draw.uniform(0.0, 0.06))
            process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    assert kills >= 5 and results(tmp_path / "out") == files


class Interrupted:
    """A run that stopped after some documents, for those that come after it."""

    def __init__(self, tmp_path, capsys):
        self.folder, self.capsys = tmp_path, capsys
        (tmp_path / "in").mkdir()
        lines = [json.dumps({"text": f"line {i}"}) for i in range(100)]
        (tmp_path / "in/a.txt").write_text("first")
        (tmp_path / "in/b.jsonl").write_text("\n".join([*lines, "damaged", "", ""]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(document_tasks, "TASK_BYTES", 200)
            self.refused("b.jsonl:101: not a line of JSON")

    def run(self, *flags):
        inputs = [str(self.folder / "in/a.txt"), str(self.folder / "in/b.jsonl")]
        preprocess_data.main(["--input", *inputs, "--output-prefix", str(self.folder / "x"), "--tokenizer-type", "Byte", *flags])

    def refused(self, message, *flags):
        with pytest.raises(SystemExit):
            self.run("--workers", "1", *flags)
        assert message in (printed := self.capsys.readouterr().err), printed


@pytest.fixture
def interrupted(tmp_path, capsys):
    return Interrupted(tmp_path, capsys)


def mend(interrupted):
    path = interrupted.folder / "in/b.jsonl"
    path.write_text(path.read_text().replace("damaged", '{"text": "mended"}'))


class TestGoingOn:
    def test_after_mending_what_was_not_done(self, interrupted, monkeypatch):
        mend(interrupted)
        encoded, encode = [], document_tasks.decode
        monkeypatch.setattr(document_tasks, "decode", lambda raw, *args: encoded.append(raw.name) or encode(raw, *args))
        interrupted.run("--workers", "1")
        assert "going on after " in interrupted.capsys.readouterr().err
        assert 0 < len(encoded) < 20  # the others were done
        assert interrupted.folder.joinpath("x.manifest.json").read_text().count('"documents": 102')

    def test_from_a_journal_that_does_not_tell_of_restart(self, interrupted):
        """As earlier versions wrote it."""
        path = interrupted.folder / "x.partial/journal.jsonl"
        options, *checkpoints = path.read_text().splitlines(keepends=True)
        path.write_text("".join([json.dumps({"options": json.loads(options)["options"]}) + "\n", *checkpoints]))
        mend(interrupted)
        interrupted.run("--workers", "1")
        assert "going on after " in interrupted.capsys.readouterr().err

    def test_leaving_the_damaged_line_out(self, interrupted):
        interrupted.run("--workers", "1", "--errors", "skip")
        assert "1 skipped documents left out" in interrupted.capsys.readouterr().out

    def test_standard_input_is_piped_again(self, interrupted, monkeypatch):
        """What was done of it is skipped, and must be what it was."""
        lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(100))
        prefix = str(interrupted.folder / "piped")

        def pipe(data):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            preprocess_data.main(["--input", "-", "--output-prefix", prefix, "--tokenizer-type", "Byte", "--workers", "1"])

        with monkeypatch.context() as patch:
            patch.setattr(document_tasks, "TASK_BYTES", 200)
            with pytest.raises(SystemExit):
                pipe(lines + b"damaged")
        with pytest.raises(SystemExit):
            pipe(lines.replace(b"line 3", b"line 4") + lines)
        assert "-: its first " in interrupted.capsys.readouterr().err
        pipe(lines + lines)
        assert IndexedDataset(prefix).num_documents == 200

    def test_after_ctrl_c(self, interrupted, monkeypatch):
        mend(interrupted)
        decode = document_tasks.decode

        def pressed(raw, *args):
            if raw.name.endswith(":101"):
                raise KeyboardInterrupt
            return decode(raw, *args)

        with monkeypatch.context() as patch:
            patch.setattr(document_tasks, "decode", pressed)
            with pytest.raises(SystemExit) as stopped:
                interrupted.run("--workers", "1")
        assert stopped.value.code == 130 and "interrupted\nWhat is done is in" in interrupted.capsys.readouterr().err
        interrupted.run("--workers", "1")
        assert IndexedDataset(interrupted.folder / "x").num_documents == 102

    def test_not_with_other_options(self, interrupted):
        interrupted.refused("x.partial was begun with append_eod False, now it is True; take the same options", "--append-eod")
        mend(interrupted)
        interrupted.run("--workers", "1", "--append-eod", "--restart")
        assert "going on" not in interrupted.capsys.readouterr().err

    def test_not_with_other_text(self, interrupted):
        path = interrupted.folder / "in/b.jsonl"
        path.write_text(path.read_text().replace("line 7", "line 8"))
        interrupted.refused("documents are not those that were read before the interruption")
        path.write_text('{"text": "line 0"}\n')
        interrupted.refused("documents are not those that were read before the interruption")

    def test_not_with_other_files(self, interrupted):
        (interrupted.folder / "in/a.txt").write_text("changed")
        interrupted.refused("an earlier run has read " + str(interrupted.folder / "in/a.txt") + ", it has another size now")

    @pytest.mark.parametrize("others", [["b.txt"], ["a.txt", "b.txt"], ["b.txt", "a.txt"]])
    def test_not_with_other_files_when_killed_while_publishing(self, tmp_path, capsys, others):
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text(f"at least 30 bytes of text in {name}")
        process = forked(killed_in_publish, 6, tmp_path / "a.txt", tmp_path / "x")
        process.join()
        assert '"manifest"' in (tmp_path / "x.partial/journal.jsonl").read_text()  # all is done but the names
        command = ["--output-prefix", str(tmp_path / "x"), *FLAGS, "--workers", "1", "--input"]
        with pytest.raises(SystemExit):
            preprocess_data.main([*command, *(str(tmp_path / name) for name in others)])
        found = f"now {tmp_path / 'b.txt'} comes {'after it' if others[0] == 'a.txt' else 'there'}; put the input back as it was"
        assert found in (printed := capsys.readouterr().err) and "begin anew with --restart" in printed
        preprocess_data.main([*command, str(tmp_path / "a.txt")])
        assert (tmp_path / "x.groups").read_text() == f"{tmp_path / 'a.txt'}\n"

    def test_not_while_another_process_writes(self, interrupted):
        with PartialDataset(str(interrupted.folder / "y"), "<u2", {}) as other:
            with pytest.raises(DatasetError, match=r"another process is writing .*y.partial \(process \d+ on .*\); wait for it"):
                PartialDataset(str(interrupted.folder / "y"), "<u2", {})
            assert other.last is None

    def test_not_with_damaged_files(self, interrupted):
        (interrupted.folder / "x.partial/lengths").write_bytes(b"")
        interrupted.refused("x.partial/lengths: expected at least")

    def test_part_of_a_journal_line_is_nothing(self, interrupted):
        with open(interrupted.folder / "x.partial/journal.jsonl", "ab") as journal:
            journal.write(b'{"position": {"sou')
        mend(interrupted)
        interrupted.run("--workers", "1")
        assert interrupted.folder.joinpath("x.manifest.json").read_text().count('"documents": 102')
