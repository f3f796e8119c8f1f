"""From text to .bin/.idx: the tokens of every document in order, the same for any number of workers, nothing lost silently."""

import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacp.data import document_tasks, workers
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.manifest import read_manifest
from megacp.data.partial_dataset import PartialDataset
from megacp.data.safe_cuts import PIECE_CHARS
from megacp.data.tokenizer import build_tokenizer
from megacp.data.verification import verify_dataset
from tests.data.tokenizers import PRE_TOKENIZERS, byte_level
from tools import preprocess_data

ROOT = Path(preprocess_data.__file__).parent.parent
EOD = 257


def run(tmp_path, *arguments, inputs):
    """The command on bytes, one worker; the dataset it made."""
    document_tasks.load_tokenizer.cache_clear()  # a process of its own would load it
    prefix = str(tmp_path / "out/x")
    defaults = ["--output-prefix", prefix, "--tokenizer-type", "Byte", "--workers", "1"]
    preprocess_data.main(["--input", *map(str, inputs), *defaults, *arguments])
    return IndexedDataset(prefix)


def documents_of(dataset):
    return [dataset.read_document(d, 0, int(length)).tolist() for d, length in enumerate(dataset.document_lengths)]


def write_corpus(tmp_path, count):
    """Documents of 0 to a few thousand bytes, so that tasks hold one, many or parts of the corpus. Returns their texts."""
    texts = [f"document {i} é " * (i * 37 % 200) for i in range(count)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def test_files_folder_and_json_lines(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.txt").write_text("bé")
    (tmp_path / "in/a.txt").write_text("a")
    (tmp_path / "in/empty.txt").write_text("")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    dataset = run(tmp_path, "--append-eod", inputs=[tmp_path / "c.jsonl.gz", tmp_path / "in"])
    assert documents_of(dataset) == [[*b"c", EOD], [*b"a", EOD], [*"bé".encode(), EOD]]
    assert dataset.dtype.name == "uint16"
    printed = capsys.readouterr().out
    assert "3 documents, 8 tokens (uint16)" in printed and "1 empty documents left out (0 tokens)" in printed
    assert f"--data-path {tmp_path}/out/x --vocab-size 258" in printed
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.manifest.json"]


def test_without_eod(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    assert documents_of(run(tmp_path, inputs=[tmp_path / "a.txt"])) == [[*b"ab"]]


@pytest.mark.parametrize("count", ["1", "3"])
def test_same_output_for_any_workers(tmp_path, monkeypatch, count):
    monkeypatch.setattr(document_tasks, "TASK_BYTES", 4096)
    texts = write_corpus(tmp_path, 150)
    dataset = run(tmp_path, "--append-eod", "--workers", count, inputs=[tmp_path / "c.jsonl"])
    assert documents_of(dataset) == [[*text.encode(), EOD] for text in texts if text]


LONG = "é word, " * 700_000  # 6.3 MB: in parts


@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "parquet"])
def test_a_long_document_is_shared_by_the_workers(tmp_path, count, kind):
    path = tmp_path / f"long.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": ["first", LONG]}), path)
    else:
        data = (
            LONG.encode() if "txt" in kind else json.dumps({"text": "first"}).encode() + b"\n" + json.dumps({"text": LONG}).encode()
        )
        path.write_bytes(gzip.compress(data, 1) if kind.endswith("gz") else data)
    dataset = run(tmp_path, "--append-eod", "--prepend-bos", "--workers", count, inputs=[path])
    *first, ids = [dataset.read_document(d, 0, int(length)) for d, length in enumerate(dataset.document_lengths)]
    assert [document.tolist() for document in first] == ([] if "txt" in kind else [[256, *b"first", EOD]])
    assert ids[0] == 256 and ids[-1] == EOD and bytes(ids[1:-1].astype("u1")) == LONG.encode()


def test_parts_of_a_long_document_are_sent_apart(tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    tokenizer = build_tokenizer("Byte")
    encoder = document_tasks.Encoder("Byte", None, "strict", ("text",), 1000)
    tasks = list(document_tasks.TaskReader(preprocess_data.find_sources([str(tmp_path / "a.txt")]), tokenizer, encoder))
    assert len(tasks) == 1 + -(-len(LONG) // document_tasks.TASK_CHARS)
    assert [task.is_last for task in tasks[:-1]] == [False] * (len(tasks) - 2) + [True]


def test_standard_input(tmp_path, monkeypatch):
    for form, data, wanted in [("jsonl", b'{"text": "a"}\n{"text": "b"}\n', [[*b"a"], [*b"b"]]), ("text", b"a\nb", [[*b"a\nb"]])]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert documents_of(run(tmp_path, "--stdin-format", form, inputs=["-"])) == wanted
    with pytest.raises(SystemExit):
        run(tmp_path, inputs=["-", "-"])


class TestFilters:
    def counts(self, tmp_path, *flags, texts):
        (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        dataset = run(tmp_path, "--append-eod", "--restart", *flags, inputs=[tmp_path / "c.jsonl"])
        counts = read_manifest(str(tmp_path / "out/x")).counts
        return [bytes(ids[:-1]).decode() for ids in documents_of(dataset)], {key: value for key, value in counts.items() if value}

    def test_lengths_without_the_tokens_around(self, tmp_path):
        kept, counts = self.counts(tmp_path, "--min-tokens", "2", "--max-tokens", "3", texts=["a", "bb", "ccc", "dddd", ""])
        assert kept == ["bb", "ccc"]
        assert counts == {"documents": 2, "tokens": 7, "text_bytes": 5, "read_bytes": 10, "empty": 1, "too_short": 1,
                          "too_short_tokens": 1, "too_long": 1, "too_long_tokens": 4}  # fmt: skip

    def test_the_first_of_equal_texts_stays(self, tmp_path):
        kept, counts = self.counts(tmp_path, "--dedup", texts=["a", "b", "a", "a", "B"])
        assert kept == ["a", "b", "B"] and (counts["duplicate"], counts["duplicate_tokens"]) == (2, 2)

    def test_a_long_document_that_is_not_wanted_leaves_nothing(self, tmp_path, capsys):
        kept, counts = self.counts(tmp_path, "--dedup", texts=["a", LONG, LONG, "b"])
        assert kept == ["a", LONG, "b"] and (counts["duplicate"], counts["duplicate_tokens"]) == (1, len(LONG.encode()))
        assert "1 duplicate documents left out (6,300,000 tokens)" in capsys.readouterr().out
        kept, counts = self.counts(tmp_path, "--max-tokens", "6000000", texts=["a", LONG, "b"])
        assert kept == ["a", "b"] and counts["too_long_tokens"] == len(LONG.encode())


def test_groups(tmp_path):
    """A line a document that is kept, for pack_documents --group-by."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("a")
    (tmp_path / "in/empty.txt").write_text("")
    lines = [{"text": "x", "site": "é.org", "n": 1, "list": [1]}, {"text": LONG, "site": "b.org"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path, "--write-groups", inputs=[tmp_path / "in", tmp_path / "c.jsonl"])
    groups = (tmp_path / "out/x.groups").read_text().splitlines()
    assert groups[0] == f"{tmp_path}/in/a.txt" and [json.loads(line) for line in groups[1:]] == [
        {"site": "é.org", "n": 1}, {"site": "b.org"},
    ]  # fmt: skip
    run(tmp_path, "--restart", inputs=[tmp_path / "in"])
    assert not (tmp_path / "out/x.groups").exists()  # it was another dataset's


def test_manifest_tells_and_verify_checks(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    run(tmp_path, inputs=[tmp_path / "a.txt", tmp_path / "c.jsonl.gz"])
    manifest = read_manifest(str(tmp_path / "out/x"))
    assert [(one["path"], one["sha256"], one["documents"]) for one in manifest.inputs] == [
        (str(tmp_path / "a.txt"), hashlib.sha256(b"ab").hexdigest(), 1),
        (str(tmp_path / "c.jsonl.gz"), hashlib.sha256(b'{"text": "c"}\n').hexdigest(), 1),
    ]
    assert manifest.tokenizer["type"] == "Byte" and (manifest.counts["tokens"], manifest.output["tokens"]) == (3, 3)
    assert any("sha256 of .bin and .idx" in line for line in verify_dataset(str(tmp_path / "out/x")))
    (tmp_path / "out/x.bin").write_bytes(b"\0\0" * 3)
    with pytest.raises(DatasetError, match=r"x\.bin: sha256"):
        verify_dataset(str(tmp_path / "out/x"))


class TestRoundTrip:
    """NFC makes one letter of "e" and an accent, so Qwen's tokenizer does not give such a text back."""

    def run(self, tmp_path, *flags):
        byte_level(PRE_TOKENIZERS["qwen"]).save(str(tmp_path / "tokenizer.json"))
        lines = [{"text": "fine\n"}, {"text": "one\n\u00e9 e\u0301 two"}]
        (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        flags = ["--tokenizer-type", "HuggingFace", "--tokenizer-model", str(tmp_path / "tokenizer.json"), *flags]
        return run(tmp_path, *flags, inputs=[tmp_path / "c.jsonl"])

    def test_the_place_is_named(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            self.run(tmp_path, "--check-round-trip")
        assert "c.jsonl:2: line 2, byte 7: the tokenizer gives back 'é two' for 'e\u0301 two'" in capsys.readouterr().err

    def test_kept_or_left_out(self, tmp_path, capsys):
        assert self.run(tmp_path, "--check-round-trip", "--errors", "replace").num_documents == 2
        assert "1 documents kept that the tokenizer does not give back" in capsys.readouterr().out
        assert self.run(tmp_path, "--check-round-trip", "--errors", "skip").num_documents == 1
        assert self.run(tmp_path, "--restart").num_documents == 2


def test_a_stretch_without_a_cut_names_document_line_and_byte(tmp_path, capsys):
    byte_level(PRE_TOKENIZERS["qwen"]).save(str(tmp_path / "tokenizer.json"))
    model = ["--tokenizer-type", "HuggingFace", "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    (tmp_path / "a.txt").write_text("fine\n" + "x" * 300_000)
    with pytest.raises(SystemExit):
        run(tmp_path, *model, "--max-stretch-chars", "100000", inputs=[tmp_path / "a.txt"])
    assert f"a.txt: line 2, byte {PIECE_CHARS}: no place in 100,000 characters" in capsys.readouterr().err
    assert run(tmp_path, *model, "--max-stretch-chars", str(300_005 - PIECE_CHARS), inputs=[tmp_path / "a.txt"]).num_documents == 1


def test_few_documents_in_memory(monkeypatch):
    """The input is read as the output is written: never more than a few tasks a worker ahead."""
    read = 0

    def numbers():
        nonlocal read
        for read in range(1, 101):
            yield read

    ahead = []
    for done, result in enumerate(workers.map_in_order(str, numbers(), workers=2)):
        assert result == str(done + 1)
        ahead.append(read - done)
    assert len(ahead) == 100 and max(ahead) <= 2 * workers.TASKS_PER_WORKER + 1


def die(_):
    os._exit(9)


def test_a_killed_worker_is_an_error_not_a_hang():
    with pytest.raises(DatasetError, match="a worker process died .*--workers 2"):
        list(workers.map_in_order(die, range(9), workers=2))


def test_progress_shows_bytes_and_tokens(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(preprocess_data, "PROGRESS_SECONDS", 0.0)
    (tmp_path / "a.txt").write_text("a" * 1_500_000)
    run(tmp_path, inputs=[tmp_path / "a.txt"])
    line = capsys.readouterr().err
    assert "1.5 of 1.5 MB (100%) " in line and "MB/s" in line and "M tokens/s, 1 documents   0 s left" in line


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_bad_document_stops_and_can_be_mended(tmp_path, count, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("fine")
    (tmp_path / "in/b.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, "--workers", count, inputs=[tmp_path / "in"])
    printed = capsys.readouterr().err
    assert stopped.value.code == 1 and "b.txt: byte 0xff at offset 0 is not UTF-8" in printed and "Nothing was written" in printed
    assert os.listdir(tmp_path / "out") == []
    (tmp_path / "in/b.txt").write_text("mended")
    assert documents_of(run(tmp_path, inputs=[tmp_path / "in"])) == [[*b"fine"], [*b"mended"]]


@pytest.mark.parametrize("text", [b"good " * 2_000_000 + b"\xff", b'{"text": "' + b"good " * 2_000_000 + b'\\q"}'])
def test_a_long_document_that_cannot_be_used(tmp_path, capsys, text):
    """It turns out when much of it has been written already."""
    path = tmp_path / ("x.jsonl" if text.startswith(b"{") else "x.txt")
    path.write_bytes(text)
    inputs = [tmp_path / "a.txt", path, tmp_path / "b.txt"]
    inputs[0].write_text("a")
    inputs[2].write_text("b")
    with pytest.raises(SystemExit):
        run(tmp_path, inputs=inputs)
    message = (
        "byte 0xff at offset 10000000 is not UTF-8"
        if path.suffix == ".txt"
        else "not a line of JSON (Invalid \\escape at byte 10000010)"
    )
    assert message in (printed := capsys.readouterr().err) and f"{path}" in printed and "What is done is in" in printed
    assert documents_of(run(tmp_path, "--errors", "skip", inputs=inputs)) == [[*b"a"], [*b"b"]]


def test_skipped_documents_are_counted(tmp_path, capsys):
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n{"text": "b"}\n')
    dataset = run(tmp_path, "--errors", "skip", inputs=[tmp_path / "c.jsonl"])
    assert documents_of(dataset) == [[*b"a"], [*b"b"]]
    assert f"1 skipped documents left out (0 tokens): {tmp_path}/c.jsonl:2" in capsys.readouterr().out


def test_refusals(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    for flags, inputs, message in [
        ([], [tmp_path / "absent"], "absent does not exist"),
        ([], [tmp_path / "empty.txt"], "no document is left (1 empty, 0 skipped"),
        (["--tokenizer-type", "SentencePiece"], [tmp_path / "empty.txt"], "--tokenizer-type SentencePiece needs --tokenizer-model"),
        (["--workers", "0"], [tmp_path / "empty.txt"], "--workers 0 must be at least 1"),
        (["--min-tokens", "5", "--max-tokens", "4"], [tmp_path / "empty.txt"], "--max-tokens 4 is less than --min-tokens 5"),
    ]:
        with pytest.raises(SystemExit):
            run(tmp_path, *flags, inputs=inputs)
        assert message in capsys.readouterr().err


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(document_tasks, "TASK_BYTES", 100)
    monkeypatch.setattr(preprocess_data, "CHECKPOINT_SECONDS", 0.0)
    texts = write_corpus(tmp_path, 60)
    left = 40_000

    def append(self, ids):
        nonlocal left
        left -= len(ids)
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, ids)

    whole = PartialDataset.append
    with monkeypatch.context() as patch:
        patch.setattr(PartialDataset, "append", append)
        with pytest.raises(SystemExit):
            run(tmp_path, inputs=[tmp_path / "c.jsonl"])
    assert "No space left on device\nWhat is done is in" in capsys.readouterr().err
    assert documents_of(run(tmp_path, inputs=[tmp_path / "c.jsonl"])) == [[*text.encode()] for text in texts if text]
    assert "going on after " in capsys.readouterr().err


def test_command_line(tmp_path):
    """As the documentation says to launch it."""
    (tmp_path / "a.txt").write_text("ab")
    arguments = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer-type", "Byte", "--workers", "2"]
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *arguments]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True, timeout=60)
    assert documents_of(IndexedDataset(tmp_path / "x")) == [[*b"ab"]]
