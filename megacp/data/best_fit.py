"""Best-fit-decreasing bin packing of tens of millions of items: pure arithmetic, O(n log n).

Worked example: sizes 6 5 4 3 3 2 into bins of 10. The largest first, each into the fullest bin that still has room.

    6 -> new bin 0, room 4          3 -> bin 1 (room 5)   room 2
    5 -> new bin 1, room 5          3 -> new bin 2        room 7
    4 -> bin 0 (room 4)  room 0     2 -> bin 1 (room 2)   room 0

    >>> best_fit_decreasing(np.array([6, 5, 4, 3, 3, 2]), 10)
    (array([0, 1, 0, 1, 2, 1]), 3)

Items of one size are placed together: the fullest bin with room for one takes as many as it can, which is what one after the
other would do. Bins with the same room are interchangeable and are kept together under that room; the rooms in use are a set
of integers that answers "the smallest that is at least s" in a few steps. So the work is one step per (size, room) that meet,
far fewer than the items when many are short. (Best-fit packing: Ding et al. 2024, arXiv 2404.10830.)
"""

from array import array

import numpy as np

_WORD_BITS = 8  # a word of the set holds 2^8 values, one bit each


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(bin of each item int64 [items], number of bins) for sizes in [1, capacity]. Deterministic; ties keep the items' order.

    Takes about 60 bytes of memory an item, and capacity / 8 bytes. Raises ValueError for a size outside.
    """
    if len(sizes) == 0:
        return np.empty(0, dtype=np.int64), 0
    distinct, counts = np.unique(sizes, return_counts=True)
    if distinct[0] < 1 or distinct[-1] > capacity:
        bad = int(distinct[0] if distinct[0] < 1 else distinct[-1])
        raise ValueError(f"an item of size {bad} does not fit bins of {capacity}; 1 to {capacity} do")
    smallest = int(distinct[0])
    run_bins, run_items = array("q"), array("q")  # the items, largest first, go to these bins, so many to each
    rooms, bins_by_room, opened = _IntegerSet(capacity + 1), {}, 0

    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist()):
        while count:
            room = rooms.at_least(size)
            per_bin = (capacity if room is None else room) // size
            wanted = -(-count // per_bin)
            if room is None:
                room, taken = capacity, list(range(opened, opened + wanted))
                opened += wanted
            else:
                waiting = bins_by_room[room]
                taken = waiting[-wanted:]
                del waiting[-wanted:]
                if not waiting:
                    del bins_by_room[room]
                    rooms.remove(room)
            last = min(per_bin, count - per_bin * (len(taken) - 1))  # items of the last of these bins
            run_bins.extend(taken)
            run_items.extend([per_bin] * (len(taken) - 1))
            run_items.append(last)
            count -= per_bin * (len(taken) - 1) + last
            for left, bins in ((room - per_bin * size, taken[:-1]), (room - last * size, taken[-1:])):
                if bins and left >= smallest:
                    if left not in bins_by_room:
                        bins_by_room[left] = []
                        rooms.add(left)
                    bins_by_room[left].extend(bins)

    bin_of_item = np.empty(len(sizes), dtype=np.int64)
    largest_first = np.argsort(-sizes, kind="stable")
    bin_of_item[largest_first] = np.repeat(np.frombuffer(run_bins, np.int64), np.frombuffer(run_items, np.int64))
    return bin_of_item, opened


class _IntegerSet:
    """A set of integers in [0, limit) as a tree of bits: bit v of a level says that word v of the level below is not empty."""

    def __init__(self, limit: int):
        self._levels = []
        while not self._levels or len(self._levels[-1]) > 1:
            limit = (limit >> _WORD_BITS) + 1
            self._levels.append([0] * limit)

    def add(self, value: int) -> None:
        for level in self._levels:
            word, bit = value >> _WORD_BITS, value & ((1 << _WORD_BITS) - 1)
            before = level[word]
            level[word] = before | (1 << bit)
            if before:
                return
            value = word

    def remove(self, value: int) -> None:
        for level in self._levels:
            word, bit = value >> _WORD_BITS, value & ((1 << _WORD_BITS) - 1)
            level[word] &= ~(1 << bit)
            if level[word]:
                return
            value = word

    def at_least(self, value: int) -> int | None:
        """The smallest member >= value."""
        for depth, level in enumerate(self._levels):
            word = value >> _WORD_BITS
            rest = level[word] >> (value & ((1 << _WORD_BITS) - 1)) if word < len(level) else 0
            if rest:
                value += _lowest_bit(rest)
                for below in reversed(self._levels[:depth]):
                    value = (value << _WORD_BITS) + _lowest_bit(below[value])
                return value
            value = word + 1
        return None


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
