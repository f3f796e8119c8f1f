"""From text to .bin/.idx: the tokens of every document in order, the same for any number of workers, complete or absent."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacp.data.indexed_dataset import IndexedDataset
from tools import preprocess_data

ROOT = Path(preprocess_data.__file__).parent.parent
EOD = 257


def run(tmp_path, *arguments, inputs):
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
    assert "3 documents, 8 tokens (uint16)" in printed and "1 empty documents left out" in printed
    assert f"--data-path {tmp_path}/out/x --vocab-size 258" in printed
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx"]


def test_without_eod(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    assert documents_of(run(tmp_path, inputs=[tmp_path / "a.txt"])) == [[*b"ab"]]


@pytest.mark.parametrize("workers", ["1", "3"])
def test_same_output_for_any_workers(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(preprocess_data, "TASK_BYTES", 4096)
    texts = write_corpus(tmp_path, 150)
    dataset = run(tmp_path, "--append-eod", "--workers", workers, inputs=[tmp_path / "c.jsonl"])
    assert documents_of(dataset) == [[*text.encode(), EOD] for text in texts if text]


def test_few_documents_in_memory(monkeypatch):
    """The input is read as the output is written: never more than a few tasks a worker ahead."""
    read = 0

    def numbers():
        nonlocal read
        for read in range(1, 101):
            yield read

    ahead = []
    for done, result in enumerate(preprocess_data.map_in_order(str, numbers(), workers=2)):
        assert result == str(done + 1)
        ahead.append(read - done)
    assert len(ahead) == 100 and max(ahead) <= 2 * preprocess_data.TASKS_PER_WORKER + 1


def die(_):
    os._exit(9)


def test_a_killed_worker_is_an_error_not_a_hang():
    with pytest.raises(preprocess_data.DatasetError, match="a worker process died .*--workers 2"):
        list(preprocess_data.map_in_order(die, range(9), workers=2))


def test_progress_shows_bytes_and_tokens(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(preprocess_data, "PROGRESS_SECONDS", 0.0)
    (tmp_path / "a.txt").write_text("a" * 1_500_000)
    run(tmp_path, inputs=[tmp_path / "a.txt"])
    assert "1.5 of 1.5 MB (100%) " in (line := capsys.readouterr().err) and "MB/s" in line and "M tokens/s   1 documents" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_document_stops_and_leaves_nothing(tmp_path, workers):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("fine")
    (tmp_path / "in/b.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit, match=r"b\.txt: byte 0xff at offset 0 is not UTF-8(.|\n)*Nothing was written"):
        run(tmp_path, "--workers", workers, inputs=[tmp_path / "in"])
    assert os.listdir(tmp_path / "out") == []


def test_skipped_documents_are_counted_and_named(tmp_path, capsys):
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n{"text": "b"}\n')
    dataset = run(tmp_path, "--errors", "skip", inputs=[tmp_path / "c.jsonl"])
    assert documents_of(dataset) == [[*b"a"], [*b"b"]]
    assert f"1 documents skipped (--errors skip): {tmp_path}/c.jsonl:2" in capsys.readouterr().out


def test_refusals(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    for inputs, message in [
        ([tmp_path / "absent"], "--input .*absent does not exist"),
        ([tmp_path / "empty.txt"], "no document with text .1 empty"),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(tmp_path, inputs=inputs)
    with pytest.raises(SystemExit, match="--tokenizer-type SentencePiece needs --tokenizer-model"):
        run(tmp_path, "--tokenizer-type", "SentencePiece", inputs=[tmp_path / "empty.txt"])
    with pytest.raises(SystemExit):
        run(tmp_path, "--workers", "0", inputs=[tmp_path / "empty.txt"])
    assert "--workers 0 must be at least 1" in capsys.readouterr().err


def test_killed_in_the_middle_leaves_the_name_free(tmp_path):
    """The command as users launch it, killed while it waits for input: nothing under the final names."""
    os.mkfifo(tmp_path / "endless")
    (tmp_path / "in").mkdir()
    waits = (
        "import sys; from tools import preprocess_data as p; p.find_sources = lambda *_: [p.Path('endless')]; p.main(sys.argv[1:])"
    )
    arguments = ["--input", "x", "--output-prefix", "in/x", "--tokenizer-type", "Byte", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", waits, *arguments], cwd=tmp_path, env=environment) as process:
        deadline = time.monotonic() + 30
        while not list((tmp_path / "in").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert [path.suffix for path in (tmp_path / "in").iterdir()] == [".tmp"]


def test_command_line(tmp_path):
    """As the documentation says to launch it."""
    (tmp_path / "a.txt").write_text("ab")
    arguments = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer-type", "Byte", "--workers", "2"]
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *arguments]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True, timeout=60)
    assert documents_of(IndexedDataset(tmp_path / "x")) == [[*b"ab"]]
