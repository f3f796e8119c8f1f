"""Blends: each dataset's samples in its own order, in the proportion of the weights at every moment."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.blended_dataset import BlendedDataset
from megacp.data.indexed_dataset import DatasetError
from megacp.data.mock_dataset import MockDataset
from tests.data.documents import ListedDataset

weight_lists = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def blend(weights, seed=0):
    return BlendedDataset([MockDataset(100, 8, d) for d in range(len(weights))], weights, seed)


@settings(max_examples=60, deadline=None)
@given(weights=weight_lists, seed=st.integers(0, 2**40))
def test_shares_hold_at_every_sample_and_none_is_skipped(weights, seed):
    blended, given_so_far = blend(weights, seed), Counter()
    for i in range(200):
        dataset, sample = blended.locate(i)
        assert sample == given_so_far[dataset]  # the next one of this dataset: none skipped, none twice
        given_so_far[dataset] += 1
        for d, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(given_so_far[d] - (i + 1) * share) <= len(weights) * share + 1 + 1e-6


@settings(max_examples=60, deadline=None)
@given(weights=weight_lists, seed=st.integers(0, 2**40), i=st.integers(2**40, 2**52))
def test_far_samples_follow_each_other(weights, seed, i):
    """Random access at a far sample continues exactly where the one before left off."""
    blended, latest = blend(weights, seed), {}
    for j in range(i, i + 40):
        dataset, sample = blended.locate(j)
        assert sample == latest.get(dataset, sample - 1) + 1
        latest[dataset] = sample
        assert abs(sample - j * weights[dataset] / sum(weights)) < len(weights) + 1 + j * 2**-31


def test_the_seed_changes_the_order():
    orders = {tuple(blend([3, 2, 1], seed).locate(i)[0] for i in range(30)) for seed in range(8)}
    assert len(orders) > 4


def test_serves_the_dataset_it_names():
    one = ListedDataset([([1, 2, 3], [0, 1, 2]), ([4, 5, 6], [0, 2])])
    other = ListedDataset([([7, 8, 9], [0, 2])])
    blended = BlendedDataset([one, other], [2, 1], seed=5)
    assert len(blended) == 3 and blended.seq_length == 2
    for i in range(3):
        dataset, sample = blended.locate(i)
        ids, borders = (one, other)[dataset].samples[sample]
        assert blended.tokens(i, 1, 3).tolist() == ids[1:3] and blended.document_borders(i).tolist() == borders
        assert blended.source(i) == "listed.bin"


def test_refusals():
    mock = MockDataset(100, 8, 0)
    for weights in ([1, 0], [1, -2], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(DatasetError, match="--data-path: weights .* above 0"):
            BlendedDataset([mock, mock], weights, 0)
    with pytest.raises(DatasetError, match="one weight each"):
        BlendedDataset([mock], [1, 2], 0)
    with pytest.raises(DatasetError, match=r"sequence lengths \[8, 9\]"):
        BlendedDataset([mock, MockDataset(100, 9, 0)], [1, 2], 0)
