"""preprocess_data never writes where it would hide, replace or read again what is there."""

import multiprocessing
import os

import pytest

from megacp.data.indexed_dataset import IndexedDataset
from megacp.data.manifest import MANIFEST
from tools import preprocess_data


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("one")
    (tmp_path / "text/b.md").write_text("two")
    return tmp_path / "text"


def run(text, prefix, *arguments):
    command = ["--input", str(text), "--output-prefix", str(prefix), "--tokenizer-type", "Byte", "--workers", "1"]
    preprocess_data.main([*command, *map(str, arguments)])
    return IndexedDataset(prefix)


def refused(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(*arguments)
    return capsys.readouterr().err


def test_another_dataset_of_the_name_is_kept(text, tmp_path, capsys):
    prefix = tmp_path / "x"
    whole = run(text, prefix).bin_path.read_bytes()
    assert run(text, prefix).bin_path.read_bytes() == whole  # the same command again: the same dataset
    printed = refused(capsys, text, prefix, "--append-eod")
    assert "another dataset (append_eod was False); name another prefix, or --restart" in printed
    assert "another dataset (it was made of other inputs)" in refused(capsys, text / "a.txt", prefix)
    before = (text / "a.txt").read_text()
    (text / "a.txt").write_text("longer than it was")
    assert f"another dataset ({text / 'a.txt'} has another size now); name another prefix, or --restart" in refused(capsys, text, prefix)
    (text / "a.txt").write_text(before)
    (tmp_path / f"x{MANIFEST}").write_text("{")
    assert "another dataset (no manifest tells what it is made of)" in refused(capsys, text, prefix)
    os.remove(f"{prefix}{MANIFEST}")  # as Megatron's datasets
    assert "another dataset (no manifest tells what it is made of)" in refused(capsys, text, prefix)
    assert (tmp_path / "x.bin").read_bytes() == whole and not (tmp_path / "x.partial").exists()
    assert run(text, prefix, "--append-eod", "--restart").num_tokens == 8


def killed(monkeypatch, text, prefix, *arguments, after_checkpoint=False):
    """Leaves PREFIX.partial of a run that was killed before its first checkpoint, or behind its last one."""
    process_input = preprocess_data.run

    def stopped(*stages):
        if after_checkpoint:
            process_input(*stages)
        os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_data, "run", stopped)
        process = multiprocessing.get_context("fork").Process(target=run, args=(text, prefix, *arguments))
        process.start()
        process.join()
    assert process.exitcode == 9 and (prefix.parent / f"{prefix.name}.partial").is_dir()


@pytest.mark.parametrize("after_checkpoint", [False, True])
def test_another_dataset_of_the_name_is_kept_after_a_kill(text, tmp_path, capsys, monkeypatch, after_checkpoint):
    """The killed run was one of the same dataset, which gives no leave to replace it by another."""
    prefix = tmp_path / "x"
    whole = run(text / "a.txt", prefix).bin_path.read_bytes()
    killed(monkeypatch, text / "a.txt", prefix, after_checkpoint=after_checkpoint)
    printed = refused(capsys, text / "b.md", prefix)
    assert "another dataset (it was made of other inputs); name another prefix, or --restart to replace it" in printed
    if not after_checkpoint:
        killed(monkeypatch, text / "a.txt", prefix)
    (text / "a.txt").write_text("longer than it was")
    assert "a.txt has another size now); name another prefix, or --restart" in refused(capsys, text / "a.txt", prefix)
    assert IndexedDataset(prefix).bin_path.read_bytes() == whole
    assert run(text / "b.md", prefix, "--restart").read(0).tobytes().decode("utf-16-le") == "two"


def test_a_killed_run_that_replaces_goes_on_with_what_it_was_given(text, tmp_path, capsys, monkeypatch):
    prefix = tmp_path / "x"
    run(text / "a.txt", prefix)
    killed(monkeypatch, text / "b.md", prefix, "--restart")  # nothing is done, so nothing tells which dataset was to come
    assert "another dataset (it was made of other inputs)" in refused(capsys, text / "b.md", prefix)
    killed(monkeypatch, text / "b.md", prefix, "--restart", after_checkpoint=True)
    assert "an earlier run has read" in refused(capsys, text / "a.txt", prefix)
    assert run(text / "b.md", prefix).read(0).tobytes().decode("utf-16-le") == "two"


def test_a_prefix_inside_the_input_is_refused(text, capsys):
    printed = refused(capsys, text, text / "x")
    assert f"is inside --input {text}, where a second run would read it as text; {text}-tokens/x works" in printed
    assert "is inside --input" in refused(capsys, text, text / "deep/x", "--extensions", ".txt", ".jsonl")
    assert sorted(os.listdir(text)) == ["a.txt", "b.md"]
    assert run(text, text / "x", "--extensions", ".txt").num_tokens == 3
    assert run(text, text / "x", "--extensions", ".txt").num_tokens == 3


def test_a_prefix_that_cannot_be_written_is_named(text, tmp_path, capsys):
    assert f"--output-prefix {text}/a.txt/x: cannot be written" in refused(capsys, text / "b.md", text / "a.txt/x")
    assert f"--output-prefix {tmp_path}/: takes a folder and a name" in refused(capsys, text, f"{tmp_path}/")


def test_bytes_have_no_model(text, tmp_path, capsys):
    printed = refused(capsys, text, tmp_path / "x", "--tokenizer-model", "t.json")
    assert "--tokenizer-model t.json contradicts --tokenizer-type Byte" in printed


def test_nothing_is_left_where_no_document_is(text, tmp_path, capsys):
    printed = refused(capsys, text, tmp_path / "x", "--min-tokens", "9")
    assert "no document is left (0 empty, 0 skipped, 2 too short" in printed and "Nothing was written." in printed
    assert not (tmp_path / "x.partial").exists()
    assert run(text, tmp_path / "x", "--min-tokens", "3").num_documents == 2


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst"])
def test_a_compressed_file_of_no_bytes_is_truncated(tmp_path, capsys, name):
    (tmp_path / name).touch()
    assert f"{name}: the file is empty, so it is not a whole" in refused(capsys, tmp_path / name, tmp_path / "x")


def test_extensions_that_no_file_has(text, tmp_path, capsys):
    assert "none of the 2 files in this folder ends in .py" in refused(capsys, text, tmp_path / "x", "--extensions", ".py")


def test_a_byte_order_mark_before_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "\xef\xbb\xbfb"}\r\n')
    assert run(path, tmp_path / "x").read_document(0, 0, 1).tolist() == [*b"a"]
    assert IndexedDataset(tmp_path / "x").read_document(1, 0, 4).tolist() == [*b"\xef\xbb\xbfb"]
