"""The samples of a step: every one read once, whatever the number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.data.sampler import micro_batch_indices


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
