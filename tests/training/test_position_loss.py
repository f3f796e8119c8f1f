"""A token in the wrong bucket would say that a model uses its context when it does not, or the reverse."""

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megacp.training.position_loss
from megacp.training.position_loss import EvaluationRecord, bucket_bounds, bucket_names, bucket_sums, context_lengths


def test_examples():
    assert doctest.testmod(megacp.training.position_loss).failed == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_positions_count_the_tokens_before_in_the_document(lengths, data):
    by_token = [place for length in lengths for place in range(length)]
    borders = (0, *torch.tensor(lengths).cumsum(0).tolist())
    first = data.draw(st.integers(0, len(by_token) - 1))
    tokens = data.draw(st.integers(0, len(by_token) - first))
    assert context_lengths(borders, first, tokens).tolist() == by_token[first : first + tokens]


def test_positions_past_32_bits():
    assert context_lengths((0, 5, 2**33), first=2**32, tokens=2).tolist() == [2**32 - 5, 2**32 - 4]


@pytest.mark.parametrize(
    "seq_length, last", [(1, "0-32K"), (32768, "0-32K"), (32769, "32K-128K"), (2**20, "512K-2M"), (2**24, "8M-32M")]
)
def test_the_last_bucket_is_the_one_that_holds_the_last_token(seq_length, last):
    names = bucket_names(bucket_bounds(seq_length))
    assert names[-1] == last
    assert names == ("0-32K", "32K-128K", "128K-512K", "512K-2M", "2M-8M", "8M-32M")[: len(names)]


@given(st.lists(st.tuples(st.integers(0, 31), st.booleans(), st.integers(0, 2**20)), max_size=40))
def test_sums_are_those_of_a_plain_loop(tokens):
    places = [place for place, _, _ in tokens]
    labels = [-100 if masked else 3 for _, masked, _ in tokens]
    losses = [0.0 if masked else loss / 64 for _, masked, loss in tokens]
    bounds = bucket_bounds(32, first=2)
    expected = [[0.0, 0] for _ in bounds[1:]]
    for place, label, loss in zip(places, labels, losses):
        bucket = max(number for number, start in enumerate(bounds[:-1]) if start <= place)
        expected[bucket][0] += loss
        expected[bucket][1] += label != -100
    as_tensor = torch.tensor(places, dtype=torch.int64)
    sums = bucket_sums(torch.tensor(losses, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64), as_tensor, bounds)
    assert sums.tolist() == expected


def test_sums_keep_what_float32_would_round_away():
    losses = torch.full((2**12,), 1.0)
    losses[0] = 2.0**25  # in fp32 the ones beside it vanish
    zeros = torch.zeros(2**12, dtype=torch.int64)
    assert bucket_sums(losses, zeros, zeros, (0, 1)).tolist() == [[2.0**25 + 2**12 - 1, 2**12]]


def test_a_record_of_sums():
    bounds = bucket_bounds(2**17 + 1)
    record = EvaluationRecord.of_sums(7, "valid", bounds, torch.tensor([[6.0, 3], [0, 0], [2.0, 1]], dtype=torch.float64), 0.5)
    assert record.values() == {
        "step": 7, "loss": 2.0, "loss_0_32k": 2.0, "loss_32k_128k": None, "loss_128k_512k": 2.0,
        "valid_tokens": 4, "tokens_0_32k": 3, "tokens_32k_128k": 0, "tokens_128k_512k": 1, "time_s": 0.5,
    }  # fmt: skip
    empty = EvaluationRecord.of_sums(7, "valid", bounds, torch.zeros(3, 2, dtype=torch.float64), 0.5)
    assert empty.loss is None and empty.losses == (None, None, None)
