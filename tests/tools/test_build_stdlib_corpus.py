"""The corpus of the quickstart: this interpreter's sources, whole, in one order."""

import json
import sysconfig
from pathlib import Path

import pytest

from tools import build_stdlib_corpus


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def library(tmp_path):
    files = {
        "b.py": b"b = 1\r\n", "a/z.py": "é".encode(), "a.py": b"", "latin.py": b"# \xe9", "notes.txt": b"no",
        "site-packages/p.py": b"no", "test/t.py": b"t", "a/tests/u.py": b"u", "a/__pycache__/c.py": b"no",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(data)
    return tmp_path / "lib"


def test_picks_and_orders(library, tmp_path):
    counted = build_stdlib_corpus.build(library, tmp_path / "out/c.jsonl", include_tests=False)
    assert counted == (3, 9, ["latin.py"])
    assert records(tmp_path / "out/c.jsonl") == [
        {"name": "a.py", "text": ""},
        {"name": "a/z.py", "text": "é"},
        {"name": "b.py", "text": "b = 1\r\n"},
    ]
    build_stdlib_corpus.build(library, tmp_path / "out/c.jsonl", include_tests=True)
    assert [record["name"] for record in records(tmp_path / "out/c.jsonl")] == [
        "a.py",
        "a/tests/u.py",
        "a/z.py",
        "b.py",
        "test/t.py",
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.jsonl"]


def test_this_interpreter(tmp_path, capsys):
    build_stdlib_corpus.main(["--output", str(tmp_path / "c.jsonl")])
    found = records(tmp_path / "c.jsonl")
    assert len(found) > 300 and sum(len(record["text"]) for record in found) > 5_000_000
    library = Path(sysconfig.get_path("stdlib"))
    for record in found[::50]:
        assert (library / record["name"]).read_bytes().decode() == record["text"]
    assert f"{len(found)} documents" in capsys.readouterr().out


def test_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(build_stdlib_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="no .py file in .*; this Python comes without its sources"):
        build_stdlib_corpus.main(["--output", str(tmp_path / "c.jsonl")])
    assert not (tmp_path / "c.jsonl").exists()
