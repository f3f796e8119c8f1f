"""Megatron's .bin/.idx, compared with files packed by hand from the format's description."""

import errno
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.indexed_dataset import DatasetError, IndexedDataset, IndexedDatasetBuilder, best_dtype
from tests.data.documents import write_dataset

CODES = {"uint8": (1, "B"), "int8": (2, "b"), "int16": (3, "h"), "int32": (4, "i"), "int64": (5, "q"), "uint16": (8, "H")}


def hand_packed(documents, dtype_name):
    """(.bin, .idx) as bytes: one sequence per document."""
    code, letter = CODES[dtype_name]
    itemsize = struct.calcsize(letter)
    binary = b"".join(struct.pack("<" + letter, token) for document in documents for token in document)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(documents)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(document)) for document in documents)
    offset = 0
    for document in documents:
        index += struct.pack("<q", offset)
        offset += len(document) * itemsize
    index += b"".join(struct.pack("<q", number) for number in range(len(documents) + 1))
    return binary, index


def write_by_hand(prefix, documents, dtype_name="uint16"):
    binary, index = hand_packed(documents, dtype_name)
    prefix.with_suffix(".bin").write_bytes(binary)
    prefix.with_suffix(".idx").write_bytes(index)
    return binary, index


@pytest.mark.parametrize("dtype_name", CODES)
@pytest.mark.parametrize("documents", [[[5, 6, 7], [8]], [[], [1, 2], [], []], [[]], []], ids=str)
def test_written_byte_for_byte(tmp_path, dtype_name, documents):
    write_dataset(tmp_path / "x", documents, np.dtype(dtype_name))
    assert ((tmp_path / "x.bin").read_bytes(), (tmp_path / "x.idx").read_bytes()) == hand_packed(documents, dtype_name)


@pytest.mark.parametrize("dtype_name", CODES)
def test_reads_a_file_packed_by_hand(tmp_path, dtype_name):
    documents = [[5, 6, 7], [], [120, 0, 1, 2]]
    write_by_hand(tmp_path / "x", documents, dtype_name)
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == np.dtype(dtype_name)
    assert [dataset.read(s).tolist() for s in range(3)] == documents
    assert [dataset.read_document(d, 0, len(documents[d])).tolist() for d in range(3)] == documents
    assert (dataset.num_tokens, dataset.num_documents) == (7, 3)
    assert dataset.sequence_lengths.tolist() == [3, 0, 4] and dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.read(2, 1, 3).tolist() == [0, 1]


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 70000), max_size=12), max_size=6), limit=st.integers(1, 5))
def test_documents_of_several_sequences(tmp_path_factory, documents, limit):
    """A document longer than a sequence may be (2^31 - 1 tokens; here `limit`) is stored in pieces and read as one."""
    dataset = write_dataset(tmp_path_factory.mktemp("d") / "x", documents, max_sequence_tokens=limit)
    assert dataset.sequence_lengths.max(initial=0) <= limit
    assert dataset.document_lengths.tolist() == [len(document) for document in documents]
    for d, document in enumerate(documents):
        for start in range(len(document) + 1):
            for stop in range(start, len(document) + 1):
                assert dataset.read_document(d, start, stop).tolist() == document[start:stop]


def test_best_dtype_is_megatrons_rule():
    assert [best_dtype(v).name for v in (256, 65499, 65500, 151936)] == ["uint16", "uint16", "int32", "int32"]


def test_reads_outside_are_refused(tmp_path):
    dataset = write_dataset(tmp_path / "x", [[1, 2, 3], [4]])
    for start, stop in [(0, 4), (-1, 2), (2, 1)]:
        with pytest.raises(IndexError, match="which has 3"):
            dataset.read(0, start, stop)
        with pytest.raises(IndexError, match="which has 3"):
            dataset.read_document(0, start, stop)


def test_ids_beyond_the_dtype_are_refused_not_wrapped(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([65535])
        with pytest.raises(DatasetError, match="document 1 has ids 3 to 65536, which uint16 cannot hold"):
            builder.add_document([65536, 3])
    with pytest.raises(DatasetError, match="float32; uint16 and int32 can"):
        IndexedDatasetBuilder(tmp_path / "y", np.float32)


class TestComplete:
    def test_nothing_under_the_name_before_finalize(self, tmp_path):
        with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
            builder.add_document([1, 2])
            assert not (tmp_path / "x.bin").exists() and not (tmp_path / "x.idx").exists()
            builder.finalize()
        assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]

    def test_a_failure_leaves_the_dataset_from_before(self, tmp_path):
        write_dataset(tmp_path / "x", [[1, 2, 3]])
        with pytest.raises(RuntimeError, match="stopped"), IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
            builder.add_document([9])
            raise RuntimeError("stopped")
        assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]
        assert IndexedDataset(tmp_path / "x").read(0).tolist() == [1, 2, 3]

    def test_killed_between_the_two_renames(self, tmp_path, monkeypatch):
        """New tokens under an old index would be silently wrong data: the index must be gone by then."""
        write_dataset(tmp_path / "x", [[1, 2, 3]])
        replace = os.replace

        def replace_until_killed(source, target):
            if str(target).endswith(".idx"):
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_until_killed)
        with pytest.raises(KeyboardInterrupt):
            write_dataset(tmp_path / "x", [[7, 8, 9]])
        with pytest.raises(DatasetError, match=r"x\.idx does not exist"):
            IndexedDataset(tmp_path / "x")

    def test_full_disk_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_dataset(tmp_path / "x", [[1]])
        assert os.listdir(tmp_path) == []


class TestBadFiles:
    documents = [[5, 6, 7], [8, 9]]

    def refuse(self, tmp_path, match):
        with pytest.raises(DatasetError, match=match):
            IndexedDataset(tmp_path / "x")

    def patch_idx(self, tmp_path, offset, replacement):
        _, index = write_by_hand(tmp_path / "x", self.documents)
        changed = index[:offset] + replacement + index[offset + len(replacement) :]
        (tmp_path / "x.idx").write_bytes(changed)

    def test_missing(self, tmp_path):
        self.refuse(tmp_path, r"x\.idx does not exist; a dataset is .*x\.bin with .*x\.idx")
        write_by_hand(tmp_path / "x", self.documents)
        (tmp_path / "x.bin").unlink()
        self.refuse(tmp_path, r"x\.bin does not exist")

    def test_prefix_given_with_its_ending(self, tmp_path):
        write_by_hand(tmp_path / "x", self.documents)
        with pytest.raises(DatasetError, match=rf"--data-path takes the prefix without the ending: {tmp_path}/x$"):
            IndexedDataset(tmp_path / "x.bin")

    @pytest.mark.parametrize("kept", range(0, 82, 3))
    def test_truncated_idx(self, tmp_path, kept):
        _, index = write_by_hand(tmp_path / "x", self.documents)
        assert len(index) == 82
        (tmp_path / "x.idx").write_bytes(index[:kept])
        self.refuse(tmp_path, rf"x\.idx: expected .* found {kept}")

    @pytest.mark.parametrize("kept", range(10))
    def test_truncated_bin(self, tmp_path, kept):
        binary, _ = write_by_hand(tmp_path / "x", self.documents)
        assert len(binary) == 10
        (tmp_path / "x.bin").write_bytes(binary[:kept])
        self.refuse(tmp_path, rf"x\.bin: the index puts sequence \d .* but the file has {kept} bytes")

    def test_bin_truncated_or_replaced_after_it_was_opened(self, tmp_path):
        binary, _ = write_by_hand(tmp_path / "x", self.documents)
        replaced, cut = IndexedDataset(tmp_path / "x"), IndexedDataset(tmp_path / "x")
        os.truncate(tmp_path / "x.bin", 4)
        assert cut.read(0, 0, 2).tolist() == [int.from_bytes(binary[at : at + 2], "little") for at in (0, 2)]
        for sequence, start in ((0, 0), (0, 2), (1, 0)):
            with pytest.raises(DatasetError, match=r"x\.bin now ends before byte \d+; it was longer when the run began"):
                cut.read(sequence, start)
        (tmp_path / "other").write_bytes(bytes(10))
        os.replace(tmp_path / "other", tmp_path / "x.bin")
        assert replaced.read(0, 0, 1).tolist() == [int.from_bytes(binary[:2], "little")], "the file that was opened"

    def test_bin_on_a_disk_that_fails(self, tmp_path, monkeypatch):
        write_by_hand(tmp_path / "x", self.documents)
        dataset = IndexedDataset(tmp_path / "x")

        def failing(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(DatasetError, match=r"x\.bin: byte 6 cannot be read \(Input/output error\)"):
            dataset.read(1)

    def test_longer_files(self, tmp_path):
        binary, index = write_by_hand(tmp_path / "x", self.documents)
        (tmp_path / "x.bin").write_bytes(binary + b"\x01\x00")
        self.refuse(tmp_path, r"x\.bin: expected 10 bytes .* found 12")
        (tmp_path / "x.bin").write_bytes(binary)
        (tmp_path / "x.idx").write_bytes(index + b"\x00")
        self.refuse(tmp_path, r"x\.idx: expected 82 bytes .* found 83; the file is longer")

    def test_magic_version_dtype(self, tmp_path):
        self.patch_idx(tmp_path, 0, b"NOTANIDX")
        self.refuse(tmp_path, "expected a Megatron index that begins with .* found b'NOTANIDX")
        self.patch_idx(tmp_path, 9, struct.pack("<Q", 2))
        self.refuse(tmp_path, "expected version 1, found 2")
        for code in (0, 6, 7, 9):
            self.patch_idx(tmp_path, 17, bytes([code]))
            self.refuse(tmp_path, rf"dtype code of an integer \(1 uint8, .*8 uint16\), found {code}")

    def test_absurd_counts(self, tmp_path):
        self.patch_idx(tmp_path, 18, struct.pack("<Q", 2**62))
        self.refuse(tmp_path, r"x\.idx: expected \d+ bytes .* found 82")

    def test_lengths_and_offsets(self, tmp_path):
        lengths, offsets = 34, 42
        self.patch_idx(tmp_path, lengths, struct.pack("<i", -3))
        self.refuse(tmp_path, "expected lengths of at least 0, found -3 for sequence 0")
        self.patch_idx(tmp_path, lengths + 4, struct.pack("<i", 2**31 - 1))
        self.refuse(tmp_path, "sequence 1 .2147483647 tokens of uint16. at bytes 6 to 4294967300")
        for offset in (-2, 1, 8, 2**63 - 2):
            self.patch_idx(tmp_path, offsets + 8, struct.pack("<q", offset))
            self.refuse(tmp_path, rf"sequence 1 .* at bytes {offset} to .* has 10 bytes")

    @pytest.mark.parametrize("indices", [(1, 1, 2), (0, 1, 3), (0, 3, 2), (0, -1, 2), (0, 1, 1)])
    def test_document_indices(self, tmp_path, indices):
        self.patch_idx(tmp_path, 58, struct.pack("<3q", *indices))
        self.refuse(tmp_path, "expected document indices that rise from 0 to 2")
