"""Histograms count every document and every token, and can be drawn."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megacp.data.histogram import draw, fill_histogram, length_histogram, text_table


@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**40)), max_size=50))
def test_every_length_is_in_the_bin_of_its_power_of_two(lengths):
    bins = length_histogram(np.array(lengths, dtype=np.int64))
    assert sum(one.count for one in bins) == len(lengths) and sum(one.tokens for one in bins) == sum(lengths)
    used = [one for one in bins if one.count]
    by_power = {}
    for length in sorted(lengths):
        by_power.setdefault(length.bit_length(), []).append(length)
    assert [(one.count, one.tokens) for one in used] == [(len(held), sum(held)) for held in by_power.values()]


def test_labels():
    assert [one.label for one in length_histogram(np.array([0, 1]))] == ["0", "1"]
    assert [one.label for one in length_histogram(np.array([3]))] == ["2-3"]
    assert length_histogram(np.array([1024]))[0].label == "1K-2K"
    assert length_histogram(np.array([2**20 - 1]))[0].label == "512K-1M"
    assert length_histogram(np.array([5 * 2**20]))[0].label == "4M-8M"


def test_fill():
    bins = fill_histogram(np.array([100, 100, 99, 50, 95]), 100)
    assert [(one.label, one.count) for one in bins if one.count] == [("50-75%", 1), ("95-99%", 1), ("99-99.9%", 1), ("100%", 2)]
    assert sum(one.tokens for one in bins) == 444


def test_text_and_picture(tmp_path):
    bins = length_histogram(np.array([3, 3, 100]))
    lines = text_table(bins, "tokens", "documents")
    assert lines[1].split() == ["2-3", "2", "6", "5.7%", "##"] and lines[-1].split()[:4] == ["64-127", "1", "100", "94.3%"]
    draw(str(tmp_path / "x.png"), "title", [("tokens", "documents", bins), ("empty", "documents", [])])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
