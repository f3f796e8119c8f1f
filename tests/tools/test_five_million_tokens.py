"""A sequence of 5,242,880 tokens of real text, from this Python's own sources to the share of one rank of eight."""

import time

import numpy as np
import pytest

from megacp.data.batch import build_micro_batch
from megacp.data.dataset import build_dataset
from megacp.data.indexed_dataset import IndexedDataset
from megacp.data.verification import verify_dataset, verify_plan
from tools import build_stdlib_corpus, pack_documents, preprocess_data

SEQ_LENGTH, RANKS = 5 * 2**20, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    build_stdlib_corpus.main(["--output", str(folder / "stdlib.jsonl")])
    byte = "--tokenizer-type Byte"
    preprocess_data.main(f"--input {folder}/stdlib.jsonl --output-prefix {folder}/stdlib {byte} --append-eod --workers 1".split())
    pack_documents.main(f"--input {folder}/stdlib --output {folder}/plan --seq-length {SEQ_LENGTH} {byte} --separator bos".split())
    return folder


def test_built_packed_and_verified(folder):
    verify_dataset(str(folder / "stdlib"), vocab_size=258)
    verify_plan(str(folder / "plan"))


def test_a_rank_of_eight_reads_its_share_in_less_than_a_second(folder, monkeypatch):
    """From opening the plan to the batch. What the memory map is asked for is counted, token by token."""
    touched, read = [], IndexedDataset.read

    def counted(self, sequence, start=0, stop=None):
        ids = read(self, sequence, start, stop)
        touched.append(len(ids))
        return ids

    monkeypatch.setattr(IndexedDataset, "read", counted)
    shares = []
    for rank in range(RANKS):
        touched.clear()
        started = time.perf_counter()
        dataset = build_dataset([str(folder / "plan")], SEQ_LENGTH, seed=1)
        batch = build_micro_batch(dataset, [0], rank, RANKS, vocab_size=258, eod=257)
        seconds = time.perf_counter() - started
        assert seconds < 1.0  # measured: 0.02 s
        assert sum(touched) <= SEQ_LENGTH // RANKS + 1
        shares.append(batch)

    sequence = dataset.sequence(0)
    plan, ids, begin = dataset.plan, np.concatenate([batch.tokens_T.numpy() for batch in shares]), 0
    for number, piece in enumerate(plan.pieces(sequence)):  # by a plain walk over the documents
        if number:
            assert ids[begin] == 256
            begin += 1
        stop = piece.start + piece.length
        assert np.array_equal(ids[begin : begin + piece.length], piece.dataset.read_document(piece.document, piece.start, stop))
        assert begin == shares[0].cu_seqlens[number]
        begin += piece.length
    assert (ids[begin:] == 257).all()
    assert sum(batch.valid_tokens for batch in shares) == dataset.label_count(0)
