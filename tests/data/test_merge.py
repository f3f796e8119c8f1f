"""Merging: the documents of all, in order; the bytes that one builder would have written."""

import os

import numpy as np
import pytest

from megacp.data.document_groups import read_groups
from megacp.data.indexed_dataset import DatasetError
from megacp.data.manifest import MANIFEST, Manifest, describe_tokenizer, read_manifest
from megacp.data.merge import merge_datasets
from megacp.data.tokenizer import ByteTokenizer
from megacp.data.verification import verify_dataset
from tests.data.documents import numbered_documents, write_dataset


@pytest.mark.parametrize("options", [{}, {"max_sequence_tokens": 3}])
def test_bytes_are_those_of_one_builder(tmp_path, options):
    documents = numbered_documents([5, 0, 8, 2, 7])
    write_dataset(tmp_path / "whole", documents, **options)
    for name, part in (("a", documents[:2]), ("b", documents[2:3]), ("c", documents[3:])):
        write_dataset(tmp_path / name, part, **options)
    merged = merge_datasets([str(tmp_path / name) for name in "abc"], str(tmp_path / "out/merged"))
    assert merged.num_documents == 5
    for ending in ("bin", "idx"):
        assert (tmp_path / f"out/merged.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_the_widest_type_holds_all(tmp_path):
    write_dataset(tmp_path / "small", [[1, 2], [3]], dtype=np.uint16)
    write_dataset(tmp_path / "large", [[70_000, 4]], dtype=np.int32)
    write_dataset(tmp_path / "whole", [[1, 2], [3], [70_000, 4]], dtype=np.int32)
    merge_datasets([str(tmp_path / "small"), str(tmp_path / "large")], str(tmp_path / "merged"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_sequences_that_do_not_lie_in_order(tmp_path):
    """Megatron allows any byte offsets; a merge keeps what they point at."""
    a, b = (write_dataset(tmp_path / name, [[1, 2, 3], [4]]) for name in "ab")
    raw = bytearray((tmp_path / "b.idx").read_bytes())
    first = len(raw) - 3 * 8 - 2 * 8  # of the pointers
    raw[first : first + 16] = np.array([4, 0], dtype="<i8").tobytes()  # [2 3 4] and [1]
    (tmp_path / "b.idx").write_bytes(raw)
    merged = merge_datasets([a.prefix, b.prefix], str(tmp_path / "m"))
    assert [merged.read(sequence).tolist() for sequence in range(4)] == [[1, 2, 3], [4], [2, 3, 4], [1]]


def test_manifest_and_groups_when_all_have_them(tmp_path):
    for name, ids in (("a", [[1, 2], [3]]), ("b", [[4]])):
        write_dataset(tmp_path / name, ids)
        documents, tokens = len(ids), sum(map(len, ids))
        source = {"path": f"{name}.txt", "bytes": tokens, "sha256": "", "documents": documents}
        output = {"dtype": "int32", "documents": documents, "tokens": tokens, "sha256": {}}
        counts = {"documents": documents, "tokens": tokens, "empty": 0}
        manifest = Manifest(describe_tokenizer(ByteTokenizer(), None), {}, [source], counts, [name], output)
        (tmp_path / f"{name}{MANIFEST}").write_text(manifest.to_json())
        (tmp_path / f"{name}.groups").write_text("".join(f"{name}/{d}\n" for d in range(documents)))
    merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m"))
    assert (tmp_path / "m.groups").read_text() == "a/0\na/1\nb/0\n"
    merged = read_manifest(str(tmp_path / "m"))
    assert merged.counts == {"documents": 3, "tokens": 4, "empty": 0} and [one["path"] for one in merged.inputs] == [
        "a.txt",
        "b.txt",
    ]
    assert merged.skipped_names == ["a", "b"]
    assert (merged.output["documents"], merged.output["tokens"], merged.tokenizer["type"]) == (3, 4, "Byte")
    assert "sha256 of .bin and .idx are those of" in verify_dataset(str(tmp_path / "m"))[1]

    (tmp_path / f"b{MANIFEST}").unlink()
    (tmp_path / "b.groups").unlink()
    merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "partly"))
    assert not (tmp_path / "partly.groups").exists() and read_manifest(str(tmp_path / "partly")) is None


def test_groups_without_a_newline_at_their_end(tmp_path):
    """As a script's "\\n".join(names) leaves them: neighbours at the seam must not become one line, and so one group."""
    for name, groups in (("a", "one\ntwo"), ("b", "three\n"), ("none", ""), ("c", "four")):
        write_dataset(tmp_path / name, [[1]] * len(groups.split()))
        (tmp_path / f"{name}.groups").write_text(groups)
    merge_datasets([str(tmp_path / name) for name in ("a", "b", "none", "c")], str(tmp_path / "m"))
    assert (tmp_path / "m.groups").read_text() == "one\ntwo\nthree\nfour\n"
    assert len(set(read_groups(tmp_path / "m.groups", 4))) == 4


def test_nothing_is_left_or_overwritten(tmp_path, monkeypatch):
    write_dataset(tmp_path / "a", [[1]])
    with pytest.raises(DatasetError, match="--output-prefix .*a: .*a.bin exists"):
        merge_datasets([str(tmp_path / "a")], str(tmp_path / "a"))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megacp.data.merge._write_index", full)
    with pytest.raises(OSError, match="No space left"):
        merge_datasets([str(tmp_path / "a")], str(tmp_path / "m"))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
