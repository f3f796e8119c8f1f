"""From the lengths of documents to sequences of at most `seq_length` tokens: pure arithmetic, no file.

Worked example, seq_length 8, documents A of 2 tokens, B 22, C 4, D 0, E 5:

    B is longer than a sequence: whole sequences B[0:8] and B[8:16], and a rest B[16:22] that is packed like a document
    best fit, largest first:  B[0:8]   B[8:16]   B[16:22], room 2   E, room 3   C, room 4   A goes where room is 2

    sequence 0   B B B B B B B B      B[0:8]
    sequence 1   B B B B B B B B      B[8:16]
    sequence 2   A A B B B B B B      in a sequence, the order of the documents
    sequence 3   C C C C - - - -      4 tokens of padding
    sequence 4   E E E E E - - -      3 tokens of padding

    >>> pack(np.array([2, 22, 4, 0, 5]), 8).filled
    array([8, 8, 8, 4, 5])

A document that fits is never cut, and no token is dropped unless asked, so sequences end in padding, without labels. (Cutting
documents wherever a sequence is full, which leaves no padding, is what training does with a dataset that has no plan.)

With `groups`, documents of one group follow each other, in their order. A group that fits a sequence is in one sequence, in
one stretch; a longer one is parted between documents into stretches as long as fit, and each is packed as one.

Sequences are in the order of the largest stretch in each, so those of a long document are neighbours.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megacp.data.best_fit import best_fit_decreasing


@dataclass(frozen=True)
class Accounting:
    """Where every token went. A document's rest is what is left of it after its whole sequences."""

    documents: int  # given
    empty_documents: int
    document_tokens: int  # in all documents given
    split_documents: int  # longer than a sequence
    short_documents: int  # dropped by drop_shorter_than
    short_rests: int
    short_tokens: int
    emptier_sequences: int  # dropped by min_fill
    emptier_tokens: int
    sequences: int  # in the plan
    seq_length: int
    packed_tokens: int  # tokens of documents in the plan
    separator_tokens: int
    padding_tokens: int
    attention_pairs: int  # sum of (length of a piece)^2 in the plan: the work of attention inside documents

    def check(self) -> None:
        """Raises AssertionError when a token is unaccounted for."""
        given = self.packed_tokens + self.short_tokens + self.emptier_tokens
        if self.document_tokens != given:
            raise AssertionError(f"{self.document_tokens} tokens given, {given} accounted for")
        laid_out = self.packed_tokens + self.separator_tokens + self.padding_tokens
        if self.sequences * self.seq_length != laid_out:
            raise AssertionError(f"{self.sequences} sequences of {self.seq_length} tokens, {laid_out} laid out")


@dataclass(frozen=True)
class Packing:
    """Piece p is tokens [starts[p], starts[p] + length) of a document, at offsets[p] of its sequence.

    Sequence i is pieces [first_pieces[i], first_pieces[i + 1]), ends at filled[i] and is padding from there. A separator, if
    there are any, stands between two pieces. `label_counts[i]`: its tokens, from the first on, that have a label: all but the
    last, or all when the document of the last piece goes on elsewhere.
    """

    documents: np.ndarray  # int64 [pieces]
    starts: np.ndarray  # int64 [pieces]
    offsets: np.ndarray  # int64 [pieces]
    first_pieces: np.ndarray  # int64 [sequences + 1]
    filled: np.ndarray  # int64 [sequences]
    label_counts: np.ndarray  # int64 [sequences]
    accounting: Accounting = field(repr=False)


class _Pieces(NamedTuple):
    documents: np.ndarray  # int64 [pieces]
    starts: np.ndarray  # int64 [pieces], tokens into the document
    lengths: np.ndarray  # int64 [pieces], tokens

    def take(self, which: np.ndarray) -> "_Pieces":
        return _Pieces(*(values[which] for values in self))


def pack(
    lengths: np.ndarray,
    seq_length: int,
    *,
    groups: np.ndarray | None = None,
    separator: bool = False,
    drop_shorter_than: int = 0,
    min_fill: float = 0.0,
) -> Packing:
    """Pack documents of `lengths` tokens (int64) into sequences. `groups`: a number for each document, equal for related ones.

    drop_shorter_than: leaves out documents, and rests of documents, of fewer tokens. min_fill: leaves out sequences of which a
    smaller fraction is filled. Both are counted. Takes about 130 bytes of memory a piece.
    """
    gap = int(separator)
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(lengths)) if groups is None else np.argsort(_first_members(groups), kind="stable")
    pieces = _cut(lengths, order, seq_length)
    is_short = pieces.lengths < drop_shorter_than
    short, pieces = pieces.take(is_short), pieces.take(~is_short)

    sizes = pieces.lengths + gap  # a sequence of n pieces has n - 1 gaps, so bins are larger by one gap too
    group_of_piece = None if groups is None else np.asarray(groups)[pieces.documents]
    item_of_piece = np.arange(len(sizes)) if groups is None else _stretches(group_of_piece, sizes, seq_length + gap)
    item_sizes = _sums(item_of_piece, sizes)
    bin_of_item, bins = best_fit_decreasing(item_sizes, seq_length + gap)
    sequence_of_piece = _in_order_of_largest(item_sizes, bin_of_item, bins)[item_of_piece]

    is_kept = _sums(sequence_of_piece, sizes) - gap >= min_fill * seq_length
    emptier = pieces.take(~is_kept[sequence_of_piece])
    kept = np.flatnonzero(is_kept[sequence_of_piece])
    kept = kept[np.argsort(sequence_of_piece[kept], kind="stable")]
    pieces, sizes = pieces.take(kept), sizes[kept]
    pieces_of_sequence = np.bincount(sequence_of_piece[kept], minlength=bins)[is_kept]
    first_pieces = _starts(pieces_of_sequence)
    ends = _starts(sizes)  # of all pieces, laid end to end
    offsets = ends[:-1] - np.repeat(ends[first_pieces[:-1]], pieces_of_sequence)
    filled = np.diff(ends[first_pieces]) - gap

    last = pieces.take(first_pieces[1:] - 1)
    goes_on = (filled == seq_length) & (last.starts + last.lengths < lengths[last.documents])
    accounting = Accounting(
        documents=len(lengths),
        empty_documents=int(np.count_nonzero(lengths == 0)),
        document_tokens=int(lengths.sum()),
        split_documents=int(np.count_nonzero(lengths > seq_length)),
        short_documents=int(np.count_nonzero(short.starts == 0)),
        short_rests=int(np.count_nonzero(short.starts)),
        short_tokens=int(short.lengths.sum()),
        emptier_sequences=int(np.count_nonzero(~is_kept)),
        emptier_tokens=int(emptier.lengths.sum()),
        sequences=len(filled),
        seq_length=seq_length,
        packed_tokens=int(pieces.lengths.sum()),
        separator_tokens=gap * (len(pieces.lengths) - len(filled)),
        padding_tokens=int((seq_length - filled).sum()),
        attention_pairs=sum_squares(pieces.lengths),
    )
    accounting.check()
    return Packing(pieces.documents, pieces.starts, offsets, first_pieces, filled, filled - 1 + goes_on, accounting)


def sum_squares(lengths: np.ndarray) -> int:
    """Exact also past 2^63."""
    distinct, counts = np.unique(lengths, return_counts=True)
    return sum(length * length * count for length, count in zip(distinct.tolist(), counts.tolist()))


def _starts(counts: np.ndarray) -> np.ndarray:
    """[3, 2] -> [0, 3, 5]"""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _sums(of_which: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum of the values of each; exact below 2^53."""
    return np.bincount(of_which, weights=values).astype(np.int64)


def _first_members(groups: np.ndarray) -> np.ndarray:
    """For each document the first document of its group: [7, 3, 7] -> [0, 1, 0]"""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return first[group]


def _cut(lengths: np.ndarray, order: np.ndarray, seq_length: int) -> _Pieces:
    """Whole sequences and a rest of each document, in `order`; none of an empty one."""
    counts = -(-lengths[order] // seq_length)
    documents = np.repeat(order, counts)
    number = np.arange(len(documents)) - np.repeat(_starts(counts)[:-1], counts)  # of the piece in its document
    starts = number * seq_length
    return _Pieces(documents, starts, np.minimum(lengths[documents] - starts, seq_length))


def _stretches(group_of_piece: np.ndarray, sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The stretch of each piece: runs of one group, as long as `capacity` holds."""
    is_first = np.ones(len(sizes), dtype=bool)
    is_first[1:] = group_of_piece[1:] != group_of_piece[:-1]
    bounds = np.append(np.flatnonzero(is_first), len(sizes))
    ends = _starts(sizes)
    for group in np.flatnonzero(np.diff(ends[bounds]) > capacity).tolist():
        first, stop = bounds[group], bounds[group + 1]
        while (first := int(np.searchsorted(ends, ends[first] + capacity, side="right")) - 1) < stop:
            is_first[first] = True
    return np.cumsum(is_first) - 1


def _in_order_of_largest(item_sizes: np.ndarray, bin_of_item: np.ndarray, bins: int) -> np.ndarray:
    """The sequence of each item: bins numbered in the order of the largest item of each, the first of them when equal."""
    largest_first = np.argsort(-item_sizes, kind="stable")
    _, place = np.unique(bin_of_item[largest_first], return_index=True)
    sequence_of_bin = np.empty(bins, dtype=np.int64)
    sequence_of_bin[np.argsort(largest_first[place])] = np.arange(bins)
    return sequence_of_bin[bin_of_item]
