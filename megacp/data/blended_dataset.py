"""Several datasets as one, each giving its share of the samples, any sample found without a table.

Worked example, weights 3 and 1: time runs in ticks, and by tick t dataset d has given floor(t * w_d + phase_d) samples, with
w = (0.75, 0.25) and a phase in [0, 1) from the seed; here phases 0.5 and 0.5.

    tick               1      2      3         4
    dataset 0 has     (1)    (2)     2        (3)         a number in brackets is higher than at the tick before:
    dataset 1 has      0     (1)     1         1          the dataset gives a sample at this tick
    samples            0      1 2              3

    sample 2 -> dataset 1, its sample 0

The number of samples a dataset has given by sample n stays within (datasets * w_d + 1) of n * w_d, for any n. All arithmetic
is on Python integers, so sample 10**15 is exact.
"""

from bisect import bisect_left

import numpy as np

from megacp.data.indexed_dataset import DatasetError

_RESOLUTION = 1 << 32  # weights are rounded to this many parts


class BlendedDataset:
    """Same interface as PackedDataset, over `datasets` in proportion to `weights` (positive, need not sum to 1)."""

    def __init__(self, datasets: list, weights: list[float], seed: int):
        if not datasets or len(datasets) != len(weights):
            raise DatasetError(f"--data-path: {len(datasets)} datasets and {len(weights)} weights; one weight each")
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise DatasetError(f"--data-path: weights {list(weights)} must all be above 0; leave a dataset out instead")
        seq_lengths = {dataset.seq_length for dataset in datasets}
        if len(seq_lengths) != 1:
            raise DatasetError(f"datasets of different sequence lengths {sorted(seq_lengths)} cannot be blended")
        self.seq_length = seq_lengths.pop()
        self.datasets = list(datasets)
        self._weights = [max(1, round(weight / sum(weights) * _RESOLUTION)) for weight in weights]
        self._scale = sum(self._weights)  # one sample, in the units of weights and phases
        words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(len(datasets))
        self._phases = [int(word) % self._scale for word in words]

    def __len__(self) -> int:
        """Sequences of one epoch of every dataset together. Samples past it are fine: each dataset counts its own epochs."""
        return sum(len(dataset) for dataset in self.datasets)

    def locate(self, i: int) -> tuple[int, int]:
        """(dataset, its sample) of sample i >= 0."""
        slack = len(self.datasets)  # by tick t, more than t - slack and fewer than t + slack samples are given
        ticks = range(max(1, i + 1 - slack), i + 2 + slack)
        tick = ticks[bisect_left(ticks, i + 1, key=lambda t: sum(self._given(t)))]
        before, after = self._given(tick - 1), self._given(tick)
        giving = [d for d in range(len(self.datasets)) if after[d] > before[d]]
        dataset = giving[i - sum(before)]
        return dataset, before[dataset]

    def _given(self, tick: int) -> list[int]:
        """Samples that each dataset has given by `tick`."""
        return [(tick * weight + phase) // self._scale for weight, phase in zip(self._weights, self._phases)]

    def source(self, i: int) -> str:
        """The file that sample i comes from, for messages."""
        dataset, sample = self.locate(i)
        return self.datasets[dataset].source(sample)

    def document_borders(self, i: int) -> np.ndarray:
        """As PackedDataset.document_borders."""
        dataset, sample = self.locate(i)
        return self.datasets[dataset].document_borders(sample)

    def tokens(self, i: int, start: int, stop: int) -> np.ndarray:
        """As PackedDataset.tokens."""
        dataset, sample = self.locate(i)
        return self.datasets[dataset].tokens(sample, start, stop)

    def label_count(self, i: int) -> int:
        """As PackedDataset.label_count."""
        dataset, sample = self.locate(i)
        return self.datasets[dataset].label_count(sample)
