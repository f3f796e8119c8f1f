"""Small datasets for the data tests."""

import numpy as np

from megacp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def write_dataset(prefix, documents, dtype=np.int32, **builder_options) -> IndexedDataset:
    """Write lists of ids as documents under `prefix` and open them."""
    with IndexedDatasetBuilder(prefix, dtype, **builder_options) as builder:
        for ids in documents:
            builder.add_document(ids)
        builder.finalize()
    return IndexedDataset(prefix)


def numbered_documents(lengths) -> list[list[int]]:
    """Documents of the given lengths in which every token has an id of its own: 0, 1, 2, ..."""
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


class ListedDataset:
    """One fixed stream of tokens and borders per sample, and a record of every (sample, start, stop) that was read."""

    def __init__(self, samples: list[tuple[list[int], list[int]]]):
        """samples: (seq_length + 1 ids, borders 0 ... seq_length) each."""
        self.samples, self.reads = samples, []
        self.seq_length = len(samples[0][0]) - 1

    def __len__(self):
        return len(self.samples)

    def source(self, i):
        return "listed.bin"

    def document_borders(self, i):
        return np.array(self.samples[i][1], dtype=np.int64)

    def tokens(self, i, start, stop):
        self.reads.append((i, start, stop))
        return np.array(self.samples[i][0][start:stop], dtype=np.int64)

    def label_count(self, i):
        return self.seq_length
