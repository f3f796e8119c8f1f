"""Packing as arithmetic: every token once, nothing cut that fits, related documents together, all of it counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.packing import pack, sum_squares

cases = st.tuples(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=25), st.integers(1, 20), st.booleans()
)


def sequences_of(packing, lengths, seq_length, gap):
    """[[(document, start, stop, offset), ...], ...], the length of a piece told from where the next begins."""
    result = []
    for i, filled in enumerate(packing.filled.tolist()):
        first, last = packing.first_pieces[i : i + 2].tolist()
        begins = [*packing.offsets[first:last].tolist(), filled + gap]
        pieces = zip(packing.documents[first:last].tolist(), packing.starts[first:last].tolist(), begins, begins[1:])
        result.append([(document, start, start + following - gap - begin, begin) for document, start, begin, following in pieces])
    return result


@settings(max_examples=200, deadline=None)
@given(case=cases, grouped=st.booleans(), data=st.data())
def test_every_token_once_and_sequences_hold(case, grouped, data):
    lengths, seq_length, separator = case
    groups = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))) if grouped else None
    packing = pack(np.array(lengths), seq_length, groups=groups, separator=separator)
    sequences = sequences_of(packing, lengths, seq_length, int(separator))
    tokens = [(d, t) for pieces in sequences for d, start, stop, _ in pieces for t in range(start, stop)]
    assert sorted(tokens) == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    for pieces, filled in zip(sequences, packing.filled.tolist()):
        assert pieces[0][3] == 0 and all(start < stop for _, start, stop, _ in pieces) and filled <= seq_length
    for d, length in enumerate(lengths):
        mine = sorted((start, stop) for pieces in sequences for document, start, stop, _ in pieces if document == d)
        assert len(mine) == -(-length // seq_length)  # only a document longer than a sequence is cut
        assert all(stop - start == seq_length for start, stop in mine[:-1])  # into whole sequences and a rest

    counts = packing.accounting
    assert counts.packed_tokens == counts.document_tokens == sum(lengths)
    assert counts.sequences * seq_length == sum(lengths) + counts.separator_tokens + counts.padding_tokens
    assert counts.separator_tokens == separator * sum(len(pieces) - 1 for pieces in sequences)
    assert counts.attention_pairs == sum((stop - start) ** 2 for pieces in sequences for _, start, stop, _ in pieces)
    again = pack(np.array(lengths), seq_length, groups=groups, separator=separator)
    for name in ("documents", "starts", "offsets", "filled"):
        assert np.array_equal(getattr(packing, name), getattr(again, name))


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_a_label_for_every_token_that_has_a_next(case):
    lengths, seq_length, separator = case
    packing = pack(np.array(lengths), seq_length, separator=separator)
    sequences = sequences_of(packing, lengths, seq_length, int(separator))
    for pieces, filled, labels in zip(sequences, packing.filled.tolist(), packing.label_counts.tolist()):
        document, _, stop, _ = pieces[-1]
        assert labels == (filled if stop < lengths[document] else filled - 1)
        assert stop == lengths[document] or filled == seq_length  # what goes on elsewhere is a whole sequence


@settings(max_examples=200, deadline=None)
@given(case=cases, data=st.data())
def test_groups_stay_together(case, data):
    lengths, seq_length, separator = case
    groups = data.draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    packing = pack(np.array(lengths), seq_length, groups=np.array(groups), separator=separator)
    sequences = sequences_of(packing, lengths, seq_length, int(separator))
    for group in set(groups):
        members = [d for d in range(len(lengths)) if groups[d] == group and lengths[d]]
        holding = [[d for d, *_ in pieces] for pieces in sequences if any(groups[d] == group for d, *_ in pieces)]
        if members and sum(lengths[d] for d in members) + separator * (len(members) - 1) <= seq_length:
            assert len(holding) == 1
            first = holding[0].index(members[0])
            assert holding[0][first : first + len(members)] == members  # next to each other, in their order
        for pieces in sequences:  # longer ones too: in order, wherever they are
            mine = [(d, start) for d, start, *_ in pieces if groups[d] == group]
            assert mine == sorted(mine)


@settings(max_examples=200, deadline=None)
@given(case=cases, shortest=st.integers(0, 8), min_fill=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_what_is_dropped_is_asked_for_and_counted(case, shortest, min_fill):
    lengths, seq_length, separator = case
    shortest = min(shortest, seq_length)
    counts = pack(np.array(lengths), seq_length, separator=separator, drop_shorter_than=shortest, min_fill=min_fill).accounting
    rests = [length % seq_length for length in lengths if length > seq_length]
    short = [length for length in lengths if 0 < length < min(shortest, seq_length + 1)]
    short_rests = [rest for rest in rests if 0 < rest < shortest]
    assert (counts.short_documents, counts.short_rests) == (len(short), len(short_rests))
    assert counts.short_tokens == sum(short) + sum(short_rests)
    everything = pack(np.array(lengths), seq_length, separator=separator, drop_shorter_than=shortest)
    emptier = everything.filled < min_fill * seq_length
    assert counts.emptier_sequences == emptier.sum()
    assert counts.packed_tokens == sum(lengths) - counts.short_tokens - counts.emptier_tokens


@settings(max_examples=100, deadline=None)
@given(case=cases)
def test_sequences_are_in_the_order_of_their_largest_piece(case):
    lengths, seq_length, separator = case
    sequences = sequences_of(pack(np.array(lengths), seq_length, separator=separator), lengths, seq_length, int(separator))
    largest = [min(pieces, key=lambda piece: (piece[1] - piece[2], piece[:2]))[:2] for pieces in sequences]
    assert largest == sorted(largest)


def test_sequences_of_a_long_document_are_neighbours():
    packing = pack(np.array([5, 40, 5, 5, 33]), 10)
    holding = [{pieces[0] for pieces in sequence} for sequence in sequences_of(packing, [5, 40, 5, 5, 33], 10, 0)]
    places = [i for i, documents in enumerate(holding) if documents == {1}]
    assert places == list(range(places[0], places[0] + 4))


def test_documents_of_more_than_2_to_the_31_tokens():
    packing = pack(np.array([2**33 + 7, 3]), 2**24)
    assert packing.accounting.sequences == 2**9 + 1 and packing.starts.max() == 2**33
    assert packing.accounting.attention_pairs == 2**9 * 2**48 + 49 + 9
    assert sum_squares(np.full(3, 2**32)) == 3 * 2**64


def test_no_document_at_all():
    for lengths in ([], [0, 0]):
        counts = pack(np.array(lengths, dtype=np.int64), 8, separator=True).accounting
        assert counts.sequences == counts.packed_tokens == 0 and counts.empty_documents == len(lengths)


def test_a_token_unaccounted_for_stops_the_packing():
    counts = pack(np.array([5, 3]), 8).accounting
    with pytest.raises(AssertionError, match="9 tokens given, 8 accounted for"):
        type(counts)(**{**vars(counts), "document_tokens": 9}).check()
