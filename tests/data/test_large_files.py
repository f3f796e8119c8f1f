"""Past 2^31 tokens and 2^32 bytes: offsets that wrap would read wrong tokens without a word. The files are sparse (a few KiB)."""

import os
import struct

import numpy as np
import pytest

from megacp.data.batch import build_micro_batch
from megacp.data.indexed_dataset import HEADER, IndexedDataset
from megacp.data.packed_dataset import PackedDataset
from megacp.data.packing_plan import PackingPlan
from tools import pack_documents

LENGTHS = [2**31 - 1, 5, 2**30, 7]  # tokens of each sequence; int32: 12 GiB
DOCUMENTS = [0, 1, 3, 4]  # document 1 is sequences 1 and 2
MARK_AT = 3  # place in a sequence that holds 100 + its number; every other token is 0


@pytest.fixture
def dataset(tmp_path):
    starts = np.cumsum([0, *LENGTHS], dtype=np.int64)
    with open(tmp_path / "x.bin", "wb") as binary:
        try:
            os.truncate(binary.fileno(), int(starts[-1]) * 4)
        except OSError as error:
            pytest.skip(f"no sparse file of {starts[-1] * 4} bytes here: {error}")
        for sequence, start in enumerate(starts[:-1]):
            binary.seek((int(start) + MARK_AT) * 4)
            binary.write(struct.pack("<i", 100 + sequence))
    with open(tmp_path / "x.idx", "wb") as index:
        index.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 4, len(LENGTHS), len(DOCUMENTS)))
        index.write(struct.pack(f"<{len(LENGTHS)}i", *LENGTHS))
        index.write(struct.pack(f"<{len(LENGTHS)}q", *(int(start) * 4 for start in starts[:-1])))
        index.write(struct.pack(f"<{len(DOCUMENTS)}q", *DOCUMENTS))
    return IndexedDataset(tmp_path / "x")


def test_reads_past_2_to_the_32_bytes(dataset):
    assert dataset.num_tokens == sum(LENGTHS) > 2**31
    assert dataset.document_lengths.tolist() == [2**31 - 1, 5 + 2**30, 7]
    for sequence in range(len(LENGTHS)):
        assert dataset.read(sequence, MARK_AT - 1, MARK_AT + 2).tolist() == [0, 100 + sequence, 0]
    assert dataset.read_document(1, 3, 9).tolist() == [101, 0, 0, 0, 0, 102]


@pytest.mark.parametrize("seq_length", [5 * 2**20, 2**31 + 2**20])
def test_packs_past_2_to_the_31_tokens(dataset, seq_length):
    """The five million tokens of the longest runs, and a sequence that passes 2^31 by itself."""
    packed = PackedDataset(dataset, (0, 3), seq_length, seed=4)
    assert len(packed) == (sum(LENGTHS) - 1) // seq_length
    found = {}
    for i in range(len(packed)):
        borders = packed.document_borders(i)
        assert borders[0] == 0 and borders[-1] == seq_length and (np.diff(borders) > 0).all()
        for border in borders[1:-1].tolist():
            stop = min(border + 12, seq_length)
            found[i, border] = packed.tokens(i, border, stop).tolist()
    starts = [ids[MARK_AT] for ids in found.values() if len(ids) > MARK_AT]
    assert starts and set(starts) <= {100, 101, 103}  # each border is the start of a document, read at its place


def test_last_rank_of_a_long_sequence(dataset):
    packed = PackedDataset(dataset, (0, 3), 2**31 + 2**20, seed=4)
    ranks = 2**16
    batch = build_micro_batch(packed, [0], ranks - 1, ranks, vocab_size=200, eod=None)
    assert batch.sequence_length == batch.cu_seqlens[-1] == 2**31 + 2**20
    assert batch.position_ids_T[-1].item() == 2**31 + 2**20 - 1


def test_plans_past_2_to_the_31_tokens(dataset, tmp_path):
    """Packed in whole sequences and rests; the last rank of a sequence past token 2^31 of its document reads its own tokens."""
    pack_documents.main(["--input", str(tmp_path / "x"), "--output", str(tmp_path / "plan"), "--seq-length", str(2**24)])
    plan = PackingPlan(tmp_path / "plan")
    assert int(plan.filled.sum()) == sum(LENGTHS) and len(plan) == -(-sum(LENGTHS) // 2**24)
    assert plan.starts.max() > 2**30 and plan.piece_lengths().max() == 2**24
    found = []
    for i in range(len(plan)):
        for piece in plan.pieces(i):
            found += plan.tokens(i, piece.offset, min(piece.offset + 12, plan.seq_length)).tolist() if piece.start == 0 else []
    assert sorted(filter(None, found)) == [100, 101, 102, 103]

    binary = tmp_path / "x.bin"
    with open(binary, "r+b") as tokens:  # a mark in the last whole sequence of the first document, in the half of rank 1 of 2
        tokens.seek((2**31 - 2**24 - 2**22) * 4)
        tokens.write(struct.pack("<i", 7))
    whole = np.flatnonzero((plan.documents == 0) & (plan.starts == 2**31 - 2**25))[0]
    i = int(np.searchsorted(plan.first_pieces, whole, side="right")) - 1
    half = PackingPlan(tmp_path / "plan").tokens(i, 2**23, 2**24 + 1)
    assert np.flatnonzero(half).tolist() == [2**23 - 2**22] and half[2**22] == 7
