"""Packing: documents laid end to end, cut into sequences, nothing lost and nothing repeated within an epoch."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megacp.data.indexed_dataset import DatasetError
from megacp.data.packed_dataset import PackedDataset
from tests.data.documents import numbered_documents, write_dataset


def written(tmp_path_factory, lengths):
    return write_dataset(tmp_path_factory.mktemp("d") / "x", numbered_documents(lengths))


def document_of(lengths):
    """token id -> (document, place in it), for numbered documents."""
    return [(d, place) for d, length in enumerate(lengths) for place in range(length)]


layouts = st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 7), st.integers(0, 2**40))


@settings(max_examples=80, deadline=None)
@given(layout=layouts, epoch=st.integers(0, 5))
def test_an_epoch_is_every_document_in_order_once(tmp_path_factory, layout, epoch):
    """Independent reading: put the sequences of an epoch back together by their labels; it is the documents, whole, shuffled."""
    lengths, seq_length, seed = layout
    assume(sum(lengths) > seq_length)
    packed = PackedDataset(written(tmp_path_factory, lengths), (0, len(lengths)), seq_length, seed)
    assert len(packed) == (sum(lengths) - 1) // seq_length and packed.empty_documents == lengths.count(0)
    samples = range(epoch * len(packed), (epoch + 1) * len(packed))
    sequences = [packed.tokens(i, 0, seq_length + 1).tolist() for i in samples]

    by_first = {sequence[0]: sequence for sequence in sequences}
    assert len(by_first) == len(sequences)  # ids are unique: no sequence twice
    (first,) = set(by_first) - {sequence[-1] for sequence in sequences}  # the one that follows no other
    stream = []
    while first in by_first:
        stream += by_first[first][:-1]
        first = by_first[first][-1]
    stream.append(first)
    assert len(stream) == len(packed) * seq_length + 1 == len(set(stream))
    assert packed.tokens_left_out == sum(lengths) - len(packed) * seq_length and 1 <= packed.tokens_left_out <= seq_length

    places = document_of(lengths)
    for before, after in zip(stream, stream[1:]):
        (document, place), (next_document, next_place) = places[before], places[after]
        whole = place == lengths[document] - 1 and next_place == 0 and next_document != document
        assert (document, place + 1) == (next_document, next_place) or whole


@settings(max_examples=80, deadline=None)
@given(layout=layouts, sample=st.integers(0, 60))
def test_borders_are_where_documents_begin(tmp_path_factory, layout, sample):
    lengths, seq_length, seed = layout
    assume(sum(lengths) > seq_length)
    packed = PackedDataset(written(tmp_path_factory, lengths), (0, len(lengths)), seq_length, seed)
    ids = packed.tokens(sample, 0, seq_length)
    places = document_of(lengths)
    begins = [p for p in range(1, seq_length) if places[ids[p]][1] == 0]
    borders = packed.document_borders(sample)
    assert borders.dtype == np.int64 and borders.tolist() == [0, *begins, seq_length]


@settings(max_examples=40, deadline=None)
@given(layout=layouts, sample=st.integers(0, 60), cut=st.data())
def test_any_piece_equals_the_piece_of_the_whole(tmp_path_factory, layout, sample, cut):
    lengths, seq_length, seed = layout
    assume(sum(lengths) > seq_length)
    packed = PackedDataset(written(tmp_path_factory, lengths), (0, len(lengths)), seq_length, seed)
    start = cut.draw(st.integers(0, seq_length + 1))
    stop = cut.draw(st.integers(start, seq_length + 1))
    whole = packed.tokens(sample, 0, seq_length + 1)
    piece = packed.tokens(sample, start, stop)
    assert piece.dtype == np.int64 and piece.tolist() == whole[start:stop].tolist()


def test_any_order_of_access_gives_the_same_samples(tmp_path):
    """A resumed job opens the dataset in the middle; two epochs may be read turn by turn."""
    indexed = write_dataset(tmp_path / "x", numbered_documents([5, 9, 2, 7, 11]))
    straight = PackedDataset(indexed, (0, 5), 4, seed=3)
    expected = {i: straight.tokens(i, 0, 5).tolist() for i in range(6 * len(straight))}
    other = PackedDataset(indexed, (0, 5), 4, seed=3)
    for i in np.random.default_rng(0).integers(0, len(expected), 200).tolist():
        assert other.tokens(i, 0, 5).tolist() == expected[i]


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path):
    indexed = write_dataset(tmp_path / "x", numbered_documents([5] * 40))

    def epoch(seed, number):
        packed = PackedDataset(indexed, (0, 40), 5, seed)
        return tuple(int(packed.tokens(number * len(packed) + i, 0, 1)[0]) for i in range(len(packed)))

    assert len({epoch(seed, number) for seed in (0, 1) for number in (0, 1, 2)}) == 6


def test_orders_of_past_epochs_are_let_go(tmp_path):
    packed = PackedDataset(write_dataset(tmp_path / "x", [[7]] * 20_000), (0, 20_000), 1000, seed=0)
    packed.tokens(0, 0, 1)
    tracemalloc.start()
    for epoch in range(12):
        packed.tokens(epoch * len(packed), 0, 1)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 3 * 16 * 20_000  # two epochs take 16 bytes a document each


def test_only_the_documents_of_the_range(tmp_path):
    indexed = write_dataset(tmp_path / "x", numbered_documents([4, 4, 0, 4, 4]))
    packed = PackedDataset(indexed, (1, 4), 1, seed=0)
    seen = {int(token) for i in range(3 * len(packed)) for token in packed.tokens(i, 0, 2)}
    assert seen == set(range(4, 12))


def test_documents_of_several_sequences_are_one_document(tmp_path):
    whole = write_dataset(tmp_path / "whole", numbered_documents([50, 3, 20]))
    pieces = write_dataset(tmp_path / "pieces", numbered_documents([50, 3, 20]), max_sequence_tokens=7)
    one, other = (PackedDataset(indexed, (0, 3), 6, seed=1) for indexed in (whole, pieces))
    for i in range(2 * len(one)):
        assert one.tokens(i, 0, 7).tolist() == other.tokens(i, 0, 7).tolist()
        assert one.document_borders(i).tolist() == other.document_borders(i).tolist()


def test_a_read_touches_only_the_tokens_asked_for(tmp_path, monkeypatch):
    indexed = write_dataset(tmp_path / "x", numbered_documents([30, 1, 0, 30, 30]))
    packed = PackedDataset(indexed, (0, 5), 16, seed=1)
    touched, read = [], indexed.read
    monkeypatch.setattr(indexed, "read", lambda *where: touched.extend(read(*where).tolist()) or read(*where))
    for i in range(len(packed)):
        touched.clear()
        assert packed.tokens(i, 5, 12).tolist() == touched


def test_memory_is_for_documents_not_tokens(tmp_path):
    """2,000 documents of 5,000 tokens: 10M tokens, 40 MB on disk; opening and reading a sample stays far below one byte a token."""
    indexed = write_dataset(tmp_path / "x", [np.arange(5000, dtype=np.int32)] * 2000)
    tracemalloc.start()
    packed = PackedDataset(indexed, (0, 2000), 8192, seed=0)
    packed.tokens(0, 0, 8193)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_too_few_tokens_names_the_flags(tmp_path):
    indexed = write_dataset(tmp_path / "x", numbered_documents([5, 3]))
    assert len(PackedDataset(indexed, (0, 2), 7, seed=0)) == 1
    with pytest.raises(DatasetError, match=r"x: documents 0 to 2 hold 8 tokens, .* --seq-length 8 .*; 7 or less fits.*--split"):
        PackedDataset(indexed, (0, 2), 8, seed=0)
    with pytest.raises(DatasetError, match="hold 0 tokens"):
        PackedDataset(indexed, (1, 1), 8, seed=0)
