"""The samples of a step: every one read once, whatever the number of ranks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.sampler import balanced_micro_batches, micro_batch_indices


def test_worked_example():
    assert micro_batch_indices(0, 12, 2, data_rank=1, data_size=3) == [[2, 3], [8, 9]]
    assert micro_batch_indices(12, 12, 2, data_rank=0, data_size=3) == [[12, 13], [18, 19]]


@given(consumed=st.integers(0, 2**40), data_size=st.integers(1, 7), micro_batch_size=st.integers(1, 4), steps=st.integers(1, 4))
def test_every_sample_of_a_step_is_read_once(consumed, data_size, micro_batch_size, steps):
    global_batch_size = data_size * micro_batch_size * steps
    read = []
    for rank in range(data_size):
        batches = micro_batch_indices(consumed, global_batch_size, micro_batch_size, rank, data_size)
        assert len(batches) == steps and all(len(batch) == micro_batch_size for batch in batches)
        read += [sample for batch in batches for sample in batch]
    assert sorted(read) == list(range(consumed, consumed + global_batch_size))


@given(consumed=st.integers(0, 2**40), data_size=st.integers(1, 7), micro_batch_size=st.integers(1, 4), steps=st.integers(1, 4))
def test_matches_the_formula(consumed, data_size, micro_batch_size, steps):
    for r in range(data_size):
        batches = micro_batch_indices(consumed, data_size * micro_batch_size * steps, micro_batch_size, r, data_size)
        for m, batch in enumerate(batches):
            assert batch == [consumed + (m * data_size + r) * micro_batch_size + b for b in range(micro_batch_size)]


def test_same_samples_on_any_layout():
    """8 samples a step, read by 1, 2 or 4 data ranks: accumulation steps trade places with ranks, the step does not change."""
    for data_size in (1, 2, 4):
        ranks = [micro_batch_indices(16, 8, 1, rank, data_size) for rank in range(data_size)]
        in_order = [sample for step in zip(*ranks) for batch in step for sample in batch]
        assert in_order == list(range(16, 24))


def test_refusals_name_a_global_batch_that_works():
    with pytest.raises(ValueError, match=r"--global-batch-size 10 .* = 4; 8 is"):
        micro_batch_indices(0, 10, 2, 0, 2)
    with pytest.raises(ValueError, match=r"--global-batch-size 0 .* = 4; 4 is"):
        micro_batch_indices(0, 0, 2, 0, 2)
    with pytest.raises(ValueError, match="--micro-batch-size 0"):
        micro_batch_indices(0, 8, 0, 0, 2)
    with pytest.raises(ValueError, match="data rank 2"):
        micro_batch_indices(0, 8, 1, 2, 2)


# ------------------------------------------------------------------------------------------------- balanced

layouts = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
slowest_total_case = st.lists(st.integers(1, 10**13), min_size=60, max_size=60)


def of_all_ranks(function, batch, micro, data_size, consumed, *cost):
    """[accumulation step][rank] -> samples"""
    ranks = [function(consumed, batch, micro, rank, data_size, *cost) for rank in range(data_size)]
    return list(zip(*ranks))


def slowest(steps, cost):
    """What a step takes when the ranks of each accumulation step wait for each other."""
    return sum(max(sum(map(cost, samples)) for samples in ranks) for ranks in steps)


@given(layout=layouts, costs=slowest_total_case)
def test_balanced_step_has_the_same_samples_and_is_no_slower(layout, costs):
    accumulation, micro, data_size, consumed = layout
    batch = accumulation * micro * data_size

    def cost(sample):
        return costs[sample - consumed]

    balanced = of_all_ranks(balanced_micro_batches, batch, micro, data_size, consumed, cost)
    plain = of_all_ranks(micro_batch_indices, batch, micro, data_size, consumed)
    assert [len(ranks) for ranks in balanced] == [data_size] * accumulation
    assert all(len(samples) == micro for ranks in balanced for samples in ranks)
    assert sorted(s for ranks in balanced for samples in ranks for s in samples) == list(range(consumed, consumed + batch))
    if micro == 1:
        assert slowest(balanced, cost) <= slowest(plain, cost)


@settings(max_examples=30, deadline=None)
@given(accumulation=st.integers(1, 3), data_size=st.integers(1, 2), costs=slowest_total_case)
def test_no_other_way_is_faster_with_micro_batches_of_one(accumulation, data_size, costs):
    batch = accumulation * data_size
    balanced = of_all_ranks(balanced_micro_batches, batch, 1, data_size, 0, costs.__getitem__)
    every_way = (
        sum(max(costs[s] for s in order[first : first + data_size]) for first in range(0, batch, data_size))
        for order in itertools.permutations(range(batch))
    )
    assert slowest(balanced, costs.__getitem__) == min(every_way)


def test_worked_example_of_balance():
    """Rank 1 had less than rank 0 in the first accumulation step, so of two equal samples it gets the earlier."""
    costs = [9, 1, 1, 8, 5, 1, 2, 5]
    dealt = [balanced_micro_batches(0, 8, 1, rank, 2, costs.__getitem__) for rank in (0, 1)]
    assert dealt == [[[0], [7], [1], [2]], [[3], [4], [6], [5]]]


def test_each_accumulation_step_is_even_by_itself():
    """What ranks wait for is the step at hand: to make up for an earlier one would only be slow a second time."""
    costs = [100, 99, 98, 1, 50, 49, 48, 2]
    balanced = of_all_ranks(balanced_micro_batches, 8, 2, 2, 0, costs.__getitem__)
    assert slowest(balanced, costs.__getitem__) == (99 + 98) + (49 + 1)


def test_ranks_of_a_skewed_step_come_out_even():
    """Half the samples are one long document, half are short ones, alternating: in order, one rank would do nearly all."""
    costs = [10**12 if sample % 2 == 0 else 10**9 for sample in range(16)]
    balanced = of_all_ranks(balanced_micro_batches, 16, 2, 2, 0, costs.__getitem__)
    assert all(len({sum(costs[s] for s in samples) for samples in ranks}) == 1 for ranks in balanced)


def test_balanced_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match="--global-batch-size 10 is not a multiple"):
        balanced_micro_batches(0, 10, 2, 0, 2, lambda sample: 1)
