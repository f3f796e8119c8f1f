"""Compressed files, tables and pipes: the same documents as plain files, damage named, content hashed."""

import gzip
import hashlib
import json
import sys

import pytest

from megacp.data.indexed_dataset import DatasetError
from megacp.data.raw_documents import Source, decode, find_sources, read_documents
from megacp.data.source_readers import open_source

LINES = b"".join(json.dumps({"text": f"{i * 7919}"}).encode() + b"\n" for i in range(500))
LONG = "é漢😀 text\n" * 300_000  # 4.5 MB, characters on the borders of chunks


def documents(path, columns=("text",), **options):
    return [(raw.name, decode(raw, json_keys=columns, **options)) for raw in read_documents(find_sources([str(path)]), columns)]


def compress_zstd(*frames):
    zstandard = pytest.importorskip("zstandard")
    return b"".join(zstandard.compress(frame) for frame in frames)


class TestCompressed:
    @pytest.mark.parametrize("ending", ["gz", "zst"])
    def test_lines_and_text(self, tmp_path, ending):
        compress = gzip.compress if ending == "gz" else compress_zstd
        (tmp_path / f"c.jsonl.{ending}").write_bytes(compress(LINES[:5000]) + compress(LINES[5000:]))  # as `cat a b` makes it
        (tmp_path / f"t.md.{ending}").write_bytes(compress(LONG.encode()))
        (tmp_path / f"e.txt.{ending}").write_bytes(compress(b""))
        found = documents(tmp_path / f"c.jsonl.{ending}")
        assert [text for _, text in found] == [f"{i * 7919}" for i in range(500)] and found[9][0].endswith(f"c.jsonl.{ending}:10")
        assert documents(tmp_path / f"t.md.{ending}") == [(str(tmp_path / f"t.md.{ending}"), LONG)]
        assert documents(tmp_path / f"e.txt.{ending}")[0][1] == ""

    @pytest.mark.parametrize(
        "damage",
        [lambda data: data[:-9], lambda data: data[:40] + b"\xff" * 20 + data[60:], lambda data: b"no zstd", lambda data: data[:3]],
    )
    def test_damaged_zstd_is_named(self, tmp_path, damage):
        (tmp_path / "x.jsonl.zst").write_bytes(damage(compress_zstd(LINES)))
        with pytest.raises(DatasetError, match=r"x\.jsonl\.zst: the zstd data is damaged or truncated after line \d+"):
            documents(tmp_path / "x.jsonl.zst")

    def test_without_the_library(self, tmp_path, monkeypatch):
        (tmp_path / "x.txt.zst").write_bytes(b"x")
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(DatasetError, match=r"x\.txt\.zst: \.zst needs zstandard, .* pip install zstandard"):
            documents(tmp_path / "x.txt.zst")

    @pytest.mark.parametrize("name, compress", [("x.jsonl", bytes), ("x.jsonl.gz", gzip.compress), ("x.txt", bytes)])
    def test_hash_is_of_the_content(self, tmp_path, name, compress):
        content = LINES if "jsonl" in name else LONG.encode()
        (tmp_path / name).write_bytes(compress(content))
        with open_source(find_sources([str(tmp_path / name)])[0]) as reader:
            first = decode(next(documents := iter(reader)))
            if "jsonl" in name:
                assert first == "0" and reader.sha256() == hashlib.sha256(LINES.splitlines(keepends=True)[0]).hexdigest()
            assert sum(1 for _ in documents) == (499 if "jsonl" in name else 0)
            assert reader.sha256() == hashlib.sha256(content).hexdigest()
            assert reader.stored_bytes() == (tmp_path / name).stat().st_size


class TestLongText:
    def test_invalid_bytes_are_named_or_mended_as_in_short_texts(self, tmp_path):
        path = tmp_path / "x.txt"
        for damaged, offset in [
            (LONG.encode() + b"\xff", len(LONG.encode())),
            (b"ab\xe6\xbc" + LONG.encode(), 2),
            (b"x" * (2**20 - 1) + b"\xe6" + LONG.encode(), 2**20 - 1),  # the first byte of a character that ends a chunk
            (LONG.encode() + b"\xe6\xbc", len(LONG.encode())),
        ]:
            path.write_bytes(damaged)
            with pytest.raises(DatasetError, match=rf"x\.txt: byte 0x{damaged[offset]:02x} at offset {offset} is not UTF-8"):
                documents(path)
            assert documents(path, errors="replace")[0][1] == damaged.decode("utf-8", errors="replace")
            assert documents(path, errors="skip")[0][1] is None

    @pytest.mark.parametrize("ascii", [True, False])
    def test_long_line_of_json(self, tmp_path, ascii):
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps({"title": "T", "text": LONG, "n": [1]}, ensure_ascii=ascii) + '\n{"text": "next"}\n')
        assert [text for _, text in documents(path)] == [LONG, "next"]
        assert documents(path, ("title", "text"), errors="skip") == [(f"{path}:1", f"T\n{LONG}"), (f"{path}:2", None)]

    @pytest.mark.parametrize(
        "fields, message",
        [
            ('{"t": "%s"}', "expected text under the key 'text' .* the line has t"),
            ('{"text": 1, "t": "%s"}', "expected text under the key 'text' .* it is 1"),
            ('{"text": "%s\\ud83d"}', r"\\ud83d is half of a surrogate pair"),
            ('{"text": "%s"', "not a line of JSON"),
        ],
    )
    def test_a_long_line_that_cannot_be_used(self, tmp_path, fields, message):
        (tmp_path / "x.jsonl").write_text(fields % ("x" * 5_000_000))
        with pytest.raises(DatasetError, match=rf"x\.jsonl:1: {message}"):
            documents(tmp_path / "x.jsonl")


class TestParquet:
    @pytest.fixture
    def table(self, tmp_path):
        def write(**columns):
            pyarrow = pytest.importorskip("pyarrow")
            path = tmp_path / "x.parquet"
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, row_group_size=3)
            return path

        return write

    def test_rows(self, table):
        path = table(title=["T", "U", "V", "W"], text=["a", "é", None, LONG])
        assert documents(path) == [(f"{path}:1", "a"), (f"{path}:2", "é"), (f"{path}:3", ""), (f"{path}:4", LONG)]
        assert [text for _, text in documents(path, ("text", "title"))] == ["a\nT", "é\nU", "\nV", f"{LONG}\nW"]

    def test_refusals(self, table, tmp_path, monkeypatch):
        path = table(title=["T"], n=[1])
        with pytest.raises(DatasetError, match=r"a column of text 'text' \(--json-keys\), there is none; the columns are title, n"):
            documents(path)
        with pytest.raises(DatasetError, match="a column of text 'n' .*, it is int64"):
            documents(path, ("n",))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DatasetError, match=r"x\.parquet: not a whole parquet file"):
            documents(path)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(DatasetError, match=r"\.parquet needs pyarrow, .* pip install pyarrow"):
            documents(path)


def test_kinds_by_name(tmp_path):
    for name, wanted in {
        "a.txt": ("text", ""), "a.md.gz": ("text", ".gz"), "a.jsonl": ("jsonl", ""), "a.jsonl.zst": ("jsonl", ".zst"),
        "a.parquet": ("parquet", ""), "a": ("text", ""),
    }.items():  # fmt: skip
        (tmp_path / name).write_text("")
        assert find_sources([str(tmp_path / name)]) == [Source(str(tmp_path / name), *wanted)]
    assert find_sources(["-"]) == [Source("-", "jsonl")]
