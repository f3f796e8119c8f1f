"""How long documents are and how full sequences are, as text for a terminal and as a picture.

    >>> print("\\n".join(text_table(length_histogram(np.array([3, 3, 100, 0])), "tokens")))
              tokens         count            tokens
                   0             1                 0    0.0%
                   1             0                 0    0.0%
                 2-3             2                 6    5.7%  ##
                 ...
              64-127             1               100   94.3%  ########################################

Lengths are counted in powers of two, and the bars show the share of tokens: a few long documents may hold most of them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacp.data.indexed_dataset import DatasetError

PICTURES = (".png", ".svg", ".pdf")
_BAR = 40  # characters


@dataclass(frozen=True)
class Bin:
    label: str
    count: int
    tokens: int


def length_histogram(lengths: np.ndarray) -> list[Bin]:
    """Counts and tokens of lengths 0, 1, 2-3, 4-7, ..., from the shortest to the longest there is."""
    exponents = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0)  # of 2^e > length; exact below 2^53
    counts = np.bincount(exponents)
    tokens = np.bincount(exponents, weights=lengths)
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return []
    return [
        Bin(_range(1 << exponent - 1, (1 << exponent) - 1) if exponent else "0", int(counts[exponent]), int(tokens[exponent]))
        for exponent in range(int(used[0]), int(used[-1]) + 1)
        if exponent or counts[0]
    ]


def fill_histogram(filled: np.ndarray, seq_length: int) -> list[Bin]:
    """Sequences by the part of them that is filled."""
    edges = [0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999]
    labels = [f"{100 * low:g}-{100 * high:g}%" for low, high in zip(edges, edges[1:])] + [f"{100 * edges[-1]:g}-100%", "100%"]
    which = np.where(filled == seq_length, len(edges), np.searchsorted(edges, filled / seq_length, side="right") - 1)
    counts = np.bincount(which, minlength=len(labels))
    tokens = np.bincount(which, weights=filled, minlength=len(labels))
    used = np.flatnonzero(counts)
    first = int(used[0]) if len(used) else 0
    return [Bin(label, int(count), int(held)) for label, count, held in list(zip(labels, counts, tokens))[first:]]


def text_table(bins: list[Bin], heading: str, noun: str = "count") -> list[str]:
    """Lines for a terminal. The bars are the shares of tokens."""
    total, most = max(1, sum(one.tokens for one in bins)), max(1, *(one.tokens for one in bins), 1)
    lines = [f"{heading:>20}  {noun:>12}  {'tokens':>16}"]
    for one in bins:
        bar = "#" * round(_BAR * one.tokens / most)
        lines.append(f"{one.label:>20}  {one.count:>12,}  {one.tokens:>16,}  {one.tokens / total:6.1%}  {bar}".rstrip())
    return lines


def check_picture(path: str) -> None:
    """Before hours of work: raises DatasetError when `draw` will not be able to write there."""
    if Path(path).suffix not in PICTURES:
        raise DatasetError(f"--histogram {path}: expected a name that ends in {', '.join(PICTURES)}")
    if not Path(path).parent.is_dir():
        raise DatasetError(f"--histogram {path}: the folder {Path(path).parent} does not exist; make it first")


def draw(path: str, title: str, panels: list[tuple[str, str, list[Bin]]]) -> None:
    """A picture (.png, .svg, .pdf) with a panel for each (heading, noun, bins): counts and shares of tokens side by side."""
    import matplotlib  # here: only who wants a picture needs it

    matplotlib.use("Agg")  # a picture, no window
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(panels), 2, figsize=(11, 0.8 + 3.3 * len(panels)), dpi=130, squeeze=False)
    for (heading, noun, bins), (left, right) in zip(panels, rows):
        total = max(1, sum(one.tokens for one in bins))
        places = np.arange(len(bins))
        left.bar(places, [one.count for one in bins], color="C0")
        right.bar(places, [100 * one.tokens / total for one in bins], color="C1")
        left.set_ylabel(noun)
        right.set_ylabel("share of tokens (%)")
        if bins and max(one.count for one in bins) > 100 * max(1, min(one.count for one in bins)):
            left.set_yscale("log")
        for axes in (left, right):
            axes.set_xlabel(heading)
            axes.set_xticks(places, [one.label for one in bins], rotation=45, ha="right", fontsize=8)
            axes.grid(axis="y", alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _range(low: int, high: int) -> str:
    """2-3, 1K-2K: exact powers of two from 1,024 on in units of 1,024."""
    if low < 1024:
        return str(low) if low == high else f"{low}-{high}"
    return f"{_short(low)}-{_short(high + 1)}"


def _short(power_of_two: int) -> str:
    unit = max(0, (power_of_two.bit_length() - 1) // 10)
    return f"{power_of_two >> 10 * unit}{'_KMGTPE'[unit]}"
