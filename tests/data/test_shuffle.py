"""The permutation: complete, and the same on every machine and numpy version."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megacp.data.shuffle import permutation


@given(count=st.integers(0, 300), seed=st.integers(0, 2**63), word=st.integers(0, 2**40))
def test_is_a_permutation(count, seed, word):
    order = permutation(count, seed, (word,))
    assert order.dtype == np.int64 and sorted(order) == list(range(count))


def test_follows_the_order_of_raw_philox_words():
    """A resumed job relies on this order: sort by the raw stream, which numpy never changes."""
    raw = np.random.Philox(np.random.SeedSequence([7, 1, 3])).random_raw(50)
    assert permutation(50, 7, (1, 3)).tolist() == sorted(range(50), key=lambda place: raw[place])


def test_seed_and_words_change_it():
    orders = [permutation(100, seed, words).tolist() for seed, words in [(1, (0, 0)), (2, (0, 0)), (1, (1, 0)), (1, (0, 1))]]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_every_place_is_equally_likely():
    counts = np.zeros((4, 4))
    for seed in range(4000):
        counts[np.arange(4), permutation(4, seed, ())] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)  # five standard deviations
