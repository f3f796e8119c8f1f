"""Reading text: in one order, nothing lost silently, every refusal with the file and the place."""

import gzip
import json

import pytest

from megacp.data.indexed_dataset import DatasetError
from megacp.data.raw_documents import RawDocument, decode, find_sources, read_documents


def lines(*records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read(*inputs, errors="strict", json_keys=("text",), extensions=None):
    raws = read_documents(find_sources([str(path) for path in inputs], extensions))
    return [(raw.name, decode(raw, errors, json_keys)) for raw in raws]


def test_files_folders_and_json_lines_in_order(tmp_path):
    for name, text in [
        ("d/b.py", "B"),
        ("d/a/z.py", "Z"),
        ("d/a.txt", "A"),
        ("d/.hidden", "no"),
        ("d/.git/x", "no"),
        ("one.txt", "é\r\n"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "d/p.jsonl").write_bytes(lines({"text": "1"}, {"text": ""}) + b"\n" + lines({"text": "4"}))
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(lines({"text": "g"})))
    found = [
        (name.removeprefix(f"{tmp_path}/"), text)
        for name, text in read(tmp_path / "one.txt", tmp_path / "d", tmp_path / "q.jsonl.gz")
    ]
    assert found == [
        ("one.txt", "é\r\n"), ("d/a.txt", "A"), ("d/a/z.py", "Z"), ("d/b.py", "B"),
        ("d/p.jsonl:1", "1"), ("d/p.jsonl:2", ""), ("d/p.jsonl:3", ""), ("d/p.jsonl:4", "4"), ("q.jsonl.gz:1", "g"),
    ]  # fmt: skip
    assert [text for _, text in read(tmp_path / "d", extensions=[".py"])] == ["Z", "B"]


def test_no_input(tmp_path):
    with pytest.raises(DatasetError, match="--input .*absent does not exist; it takes text, .jsonl and .parquet"):
        find_sources([str(tmp_path / "absent")])
    with pytest.raises(DatasetError, match="there is no file in this folder"):
        find_sources([str(tmp_path)])
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"none of the 1 files in this folder ends in .py, .md \(--extensions\)"):
        find_sources([str(tmp_path)], [".py", ".md"])


def test_invalid_utf8_names_file_and_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"good\xffbad")
    with pytest.raises(DatasetError, match=r"x\.txt: byte 0xff at offset 4 is not UTF-8; .*--errors replace or --errors skip"):
        read(tmp_path / "x.txt")
    assert read(tmp_path / "x.txt", errors="replace")[0][1] == "good\ufffdbad"
    assert read(tmp_path / "x.txt", errors="skip")[0][1] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut off', r"x\.jsonl:2: not a line of JSON"),
        (b"[" * 100_000, r"x\.jsonl:2: not a line of JSON"),
        (b'["text"]', r"x\.jsonl:2: expected an object .* found list"),
        (
            b'{"title": "t", "body": "b"}',
            r"x\.jsonl:2: expected text under the key 'text' \(--json-keys\), the line has body, title",
        ),
        (b'{"text": null}', r"x\.jsonl:2: expected text under the key 'text' .* it is null"),
        (b'{"text": "\xff"}', r"x\.jsonl:2: byte 0xff at offset 10 is not UTF-8"),
        (b'{"text": "half \\ud83d"}', r"x\.jsonl:2: \\ud83d is half of a surrogate pair, .*--errors replace"),
    ],
    ids=["cut off", "too deep", "list", "other keys", "null", "invalid UTF-8", "half a surrogate pair"],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "fine"}) + line + b"\n")
    with pytest.raises(DatasetError, match=message):
        read(tmp_path / "x.jsonl")
    assert [text for _, text in read(tmp_path / "x.jsonl", errors="skip")] == ["fine", None]


def test_replace_mends_text_but_not_json():
    assert decode(RawDocument("x:1", b'{"text": "a\\ud83d"}', True), "replace") == "a" + 3 * "\ufffd"
    assert decode(RawDocument("x:1", b'{"text": "a\xff"}', True), "replace") == "a\ufffd"
    with pytest.raises(DatasetError, match="x:1: not a line of JSON"):
        decode(RawDocument("x:1", b"{", True), "replace")


def test_a_whole_surrogate_pair_is_one_character():
    assert decode(RawDocument("x:1", b'{"text": "\\ud83d\\ude00"}', True)) == "\U0001f600"


def test_several_keys_are_joined():
    raw = RawDocument("x:1", b'{"body": "B", "title": "T"}', True)
    assert decode(raw, json_keys=["title", "body"]) == "T\nB"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:40] + b"\xff" * 20 + data[60:], lambda data: b"not gzip"]
)
def test_damaged_gzip_is_named(tmp_path, damage):
    data = gzip.compress(lines(*({"text": f"{i * 7919}"} for i in range(500))))
    (tmp_path / "x.jsonl.gz").write_bytes(damage(data))
    with pytest.raises(DatasetError, match=r"x\.jsonl\.gz: the gzip data is damaged or truncated after line \d+"):
        read(tmp_path / "x.jsonl.gz")
