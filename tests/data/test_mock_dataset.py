"""Made-up data: the same on every rank, any piece on its own, documents that can be learnt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.mock_dataset import MockDataset

settings_of_dataset = st.tuples(st.integers(2, 3000), st.integers(1, 200), st.integers(0, 2**40))


@settings(max_examples=60, deadline=None)
@given(which=settings_of_dataset, i=st.integers(0, 2**40), cut=st.data())
def test_any_piece_equals_the_piece_of_the_whole(which, i, cut):
    vocab_size, seq_length, seed = which
    dataset = MockDataset(vocab_size, seq_length, seed)
    whole = dataset.tokens(i, 0, seq_length + 1)
    assert whole.dtype == np.int64 and len(whole) == seq_length + 1 and 0 <= whole.min() and whole.max() < vocab_size
    start = cut.draw(st.integers(0, seq_length + 1))
    stop = cut.draw(st.integers(start, seq_length + 1))
    assert MockDataset(vocab_size, seq_length, seed).tokens(i, start, stop).tolist() == whole[start:stop].tolist()
    assert whole[-1] == dataset.tokens(i + 1, 0, 1)[0]  # sequences follow one another


@settings(max_examples=60, deadline=None)
@given(which=settings_of_dataset, i=st.integers(0, 2**40))
def test_documents_count_up_and_end_in_eod(which, i):
    vocab_size, seq_length, seed = which
    dataset = MockDataset(vocab_size, seq_length, seed)
    borders, ids = dataset.document_borders(i), dataset.tokens(i, 0, seq_length)
    assert borders[0] == 0 and borders[-1] == seq_length and (np.diff(borders) > 0).all()
    for begin, end in zip(borders, borders[1:]):
        assert ids[end - 1] == dataset.eod
        assert len(set(np.diff(ids[begin : end - 1]) % dataset.eod)) <= 1  # one step all along


def test_sequences_hold_several_documents_and_differ():
    dataset = MockDataset(1000, 512, seed=0)
    assert np.mean([len(dataset.document_borders(i)) - 1 for i in range(50)]) > 4
    assert len({tuple(dataset.tokens(i, 0, 512)) for i in range(50)}) == 50
    assert dataset.tokens(0, 0, 512).tolist() != MockDataset(1000, 512, seed=1).tokens(0, 0, 512).tolist()


def test_five_million_tokens_are_not_made_to_read_ten():
    dataset = MockDataset(128256, 5 * 2**20, seed=0)
    assert len(dataset.tokens(3, 5 * 2**20 - 9, 5 * 2**20 + 1)) == 10


def test_vocabulary_too_small():
    with pytest.raises(ValueError, match="--vocab-size 1 is too small"):
        MockDataset(1, 8, 0)
