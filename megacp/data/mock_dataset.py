"""Made-up documents that a model can learn, for trying a layout without any data.

A document counts up in steps of its own, 1, 2 or 3, modulo the vocabulary, and ends in `eod`, the last id. With a vocabulary
of 100 and a sequence of 8 tokens that two documents share:

    tokens    41 43 45 47 99 | 7 8 99        eod = 99
    borders   0                5      8

The first step of a document is a guess (loss up to log 3 with the last id known), the rest follow from the context. Any token
is computed from its place alone, so a rank makes only those it needs, of a sequence of any length.
"""

import numpy as np

_MAX_DOCUMENTS = 8  # documents in one sequence
_STEPS = 3


class MockDataset:
    """Same interface as PackedDataset. Sample i depends on (seed, i) alone; there is no end of samples."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int):
        if vocab_size < 2:
            raise ValueError(f"--vocab-size {vocab_size} is too small for mock data; 2 or more works")
        self.seq_length, self.eod = seq_length, vocab_size - 1
        self._seed = seed

    def __len__(self) -> int:
        """Sequences per epoch, nominally: no two samples are meant to be the same at any index."""
        return 1 << 20

    def source(self, i: int) -> str:
        """Where sample i comes from, for messages."""
        return "mock data"

    def document_borders(self, i: int) -> np.ndarray:
        """int64: 0, each place in sequence i where a document begins, seq_length."""
        return self._documents(i)[0]

    def tokens(self, i: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens [start, stop) of sequence i; token seq_length is the first of sequence i + 1."""
        if not 0 <= start <= stop <= self.seq_length + 1:
            raise IndexError(f"tokens [{start}, {stop}) of a sequence of {self.seq_length} tokens and one label")
        if stop == self.seq_length + 1 and start < stop:
            return np.concatenate([self.tokens(i, start, self.seq_length), self.tokens(i + 1, 0, 1)])
        borders, first_ids, steps = self._documents(i)
        places = np.arange(start, stop, dtype=np.int64)
        document = np.searchsorted(borders, places, side="right") - 1
        ids = (first_ids[document] + steps[document] * (places - borders[document])) % self.eod
        ids[places == borders[document + 1] - 1] = self.eod
        return ids

    def label_count(self, i: int) -> int:
        """Tokens of sequence i, from its first on, that have a label: all."""
        return self.seq_length

    def _documents(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Borders [documents + 1], first id [documents] and step [documents] of sequence i."""
        raw = np.random.Philox(np.random.SeedSequence([self._seed, i])).random_raw(3 * _MAX_DOCUMENTS)
        cuts, first_ids, steps = raw.reshape(3, _MAX_DOCUMENTS)
        inner = (cuts[1:] % np.uint64(self.seq_length)).astype(np.int64)
        borders = np.unique(np.concatenate([[0], inner, [self.seq_length]]))
        return borders, (first_ids % np.uint64(self.eod)).astype(np.int64), (1 + steps % np.uint64(_STEPS)).astype(np.int64)
