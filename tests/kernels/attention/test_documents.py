"""Document borders: the numbers they promise, the errors, and cutting into runs."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacp.kernels.attention import Documents

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def borders_of(lengths):
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    return tuple(borders)


@given(LENGTHS)
def test_counts_match_a_plain_loop(lengths):
    documents = Documents(borders_of(lengths))
    assert documents.total == sum(lengths) and len(documents) == len(lengths)
    assert documents.max_seqlen == max(lengths)
    assert documents.sum_squares == sum(n * n for n in lengths)
    assert [stop - start for start, stop in documents.spans()] == lengths


@given(LENGTHS, st.integers(1, 120), st.integers(0, 8), st.integers(1, 9))
def test_runs_hold_every_token_once_and_only_whole_documents(lengths, limit, padding, most):
    documents = Documents(borders_of(lengths))
    runs = documents.runs(limit, padding, most)
    assert [run.start for run in runs] == [0] + [run.stop for run in runs[:-1]] and runs[-1].stop == documents.total
    rebuilt = [run.start + border for run in runs for border in run.documents.cu_seqlens[1:]]
    assert (0, *rebuilt) == documents.cu_seqlens
    for run, following in zip(runs, runs[1:] + [None]):
        size = run.documents.total + padding * len(run.documents)
        assert len(run.documents) == 1 or size <= limit and len(run.documents) <= most
        if following is not None:  # and a run ends only because the next document no longer fits
            assert len(run.documents) == most or size + following.documents.cu_seqlens[1] + padding > limit
    assert documents.runs(limit, padding, most) is runs  # found once, with the copies of its borders on the device


def test_squares_are_exact_beyond_float64():
    assert Documents((0, 2**31 + 1)).sum_squares == (2**31 + 1) ** 2


@pytest.mark.parametrize("borders", [(), (0,), (1, 3), (0, 3, 3), (0, 5, 4), (0, 0)])
def test_borders_that_are_none(borders):
    with pytest.raises(ValueError, match="cu_seqlens"):
        Documents(borders)


def test_device_copy_is_int32_and_made_once():
    documents = Documents((0, 3, 8))
    copy = documents.device_cu_seqlens("cpu")
    assert copy.dtype == torch.int32 and copy.tolist() == [0, 3, 8]
    assert documents.device_cu_seqlens(torch.device("cpu")) is copy
    with pytest.raises(ValueError, match="int32"):
        Documents((0, 2**31)).device_cu_seqlens("cpu")


def test_a_hundred_thousand_documents_are_no_work():
    """What a micro-batch does on the host, for a sequence of short documents on eight ranks in query chunks of 8K: 0.1 s here."""
    borders = tuple(itertools.accumulate((1 + (7 * i) % 20 for i in range(100_000)), initial=0))
    start = time.process_time()
    documents = Documents(borders)
    assert documents.max_seqlen == 20 and documents.sum_squares > 0
    documents.device_cu_seqlens("cpu")
    assert sum(len(run.documents) for run in documents.runs(2**24, 128, 65535)) == 100_000
    tokens = documents.total // 8
    for chunk in range(0, tokens, 8192):
        for rank in range(8):
            first, last = rank * tokens + chunk, rank * tokens + min(chunk + 8192, tokens)
            origin, seen = documents.of_rows(first, last)
            assert seen.total == last - origin
            seen.device_cu_seqlens("cpu", last - first)
    assert time.process_time() - start < 0.8


def test_equal_borders_are_equal_documents():
    used = Documents((0, 3, 8))
    used.device_cu_seqlens("cpu")
    assert used == Documents((0, 3, 8)) and hash(used) == hash(Documents((0, 3, 8)))


@pytest.mark.parametrize("queries, of_queries, longest", [(8, [0, 3, 4, 8], 4), (6, [0, 1, 2, 6], 4), (2, [0, 0, 0, 2], 2)])
def test_a_kernel_is_told_the_borders_of_queries_and_of_keys(queries, of_queries, longest):
    borders = Documents((0, 3, 4, 8)).kernel_borders(torch.empty(queries, 1, 8))
    assert {name: value.tolist() if torch.is_tensor(value) else value for name, value in borders.items()} == {
        "cu_seqlens_q": of_queries, "cu_seqlens_k": [0, 3, 4, 8], "max_seqlen_q": longest, "max_seqlen_k": 4
    }  # fmt: skip
