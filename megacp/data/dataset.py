"""From --data-path and --split, or --train-data-path and its like, to the datasets that training reads.

    build_datasets(["0.3", "code", "0.7", "books"], split="969,30,1", seq_length=8192, seed=1234, parts=("train",))

opens code.bin/.idx and books.bin/.idx, takes the first 96.9% of the documents of each, packs each into sequences, and blends
them 3 to 7. A folder is a packing plan (tools/pack_documents.py), and --split divides its sequences.

All datasets here answer the same questions about sample i (any i >= 0, no end):

    tokens(i, start, stop)   int64, tokens [start, stop) of its seq_length + 1, reading no others
    document_borders(i)      int64, 0 ... seq_length: where documents begin
    label_count(i)           tokens, from the first on, that have a label; padding follows them
    source(i)                the file, for messages
    seq_length, len()        tokens per sequence, sequences per epoch
"""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from megacp.data.blended_dataset import BlendedDataset
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.mock_dataset import MockDataset
from megacp.data.packed_dataset import PackedDataset
from megacp.data.packing_plan import PackingPlan, fingerprint
from megacp.data.plan_dataset import PlanDataset

__all__ = [
    "PARTS", "BlendedDataset", "MockDataset", "PackedDataset", "PlanDataset", "SequenceDataset", "build_dataset", "build_datasets",
    "parse_data_path", "parse_split", "split_documents",
]  # fmt: skip

PARTS = ("train", "valid", "test")


class SequenceDataset(Protocol):
    """What a batch needs of a dataset; the module docstring says what each answer means."""

    seq_length: int

    def __len__(self) -> int: ...
    def source(self, i: int) -> str: ...
    def document_borders(self, i: int) -> np.ndarray: ...
    def tokens(self, i: int, start: int, stop: int) -> np.ndarray: ...
    def label_count(self, i: int) -> int: ...


def parse_data_path(data_path: list[str], flag: str = "--data-path") -> list[tuple[float, str]]:
    """["code"] -> [(1.0, "code")];  ["0.3", "code", "0.7", "books"] -> [(0.3, "code"), (0.7, "books")].

    Raises DatasetError naming the flag.
    """
    if len(data_path) == 1:
        return [(1.0, data_path[0])]
    if not data_path or len(data_path) % 2:
        raise DatasetError(
            f"{flag} {' '.join(data_path)}: takes one prefix, or pairs of weight and prefix such as 0.3 code 0.7 books"
        )
    pairs = []
    for text, prefix in zip(data_path[::2], data_path[1::2]):
        try:
            weight = float(text)
        except ValueError:
            raise DatasetError(f"{flag}: expected a weight such as 0.5 before {prefix}, found {text!r}") from None
        if not (np.isfinite(weight) and weight > 0):
            raise DatasetError(f"{flag}: weight {text} of {prefix} must be above 0; leave the dataset out instead")
        pairs.append((weight, prefix))
    return pairs


def parse_split(split: str) -> tuple[float, float, float]:
    """'969,30,1' -> (0.969, 0.03, 0.001): the shares of train, valid and test. Missing parts are 0.

    Raises DatasetError naming --split.
    """
    try:
        weights = [float(text) for text in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(np.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise DatasetError(f"--split {split}: takes up to three shares (train, valid, test) such as 969,30,1 or 100,0,0")
    train, valid, test = (weight / sum(weights) for weight in weights + [0.0] * (3 - len(weights)))
    return train, valid, test


def split_documents(split: str, num_documents: int) -> dict[str, tuple[int, int]]:
    """Document range [first, stop) of each part, in the order of the file. The ranges are disjoint and cover all."""
    bounds = [0, *(round(share * num_documents) for share in np.cumsum(parse_split(split))[:2]), num_documents]
    return {part: (bounds[p], bounds[p + 1]) for p, part in enumerate(PARTS)}


def build_datasets(
    data_path: list[str], split: str, seq_length: int, seed: int, parts: tuple[str, ...] = PARTS
) -> tuple[SequenceDataset | None, SequenceDataset | None, SequenceDataset | None]:
    """(train, valid, test). A part is None when --split gives it nothing or when it is not in `parts`.

    Raises DatasetError: --split 'train' empty, a part of `parts` with a share but no document, too few tokens for one sequence,
    or files that cannot be used.
    """
    weighted = [(weight, _open(path)) for weight, path in parse_data_path(data_path)]
    shares = dict(zip(PARTS, parse_split(split)))

    def build(part: str) -> SequenceDataset | None:
        if part not in parts or shares[part] == 0:
            return None
        packed = []
        for _, opened in weighted:
            count, noun, name = _contents(opened)
            first, stop = split_documents(split, count)[part]
            if first == stop:
                raise DatasetError(
                    f"--split {split} leaves no {noun} of {name} ({count} {noun}s) for {part}; give {part} a larger share, or 0"
                )
            packed.append(_sequences(opened, (first, stop), seq_length, seed))
        return _blend(packed, [weight for weight, _ in weighted], seed)

    train, valid, test = (build(part) for part in PARTS)
    return train, valid, test


def build_dataset(data_path: list[str], seq_length: int, seed: int) -> SequenceDataset:
    """All of --train-data-path, --valid-data-path or --test-data-path. Raises DatasetError as build_datasets does."""
    weighted = [(weight, _open(path)) for weight, path in parse_data_path(data_path)]
    packed = [_sequences(opened, (0, _contents(opened)[0]), seq_length, seed) for _, opened in weighted]
    return _blend(packed, [weight for weight, _ in weighted], seed)


def dataset_prefixes(data_path: list[str]) -> list[str]:
    """The prefixes of the datasets behind a --data-path, those of a packing plan too."""
    opened = [_open(path) for _, path in parse_data_path(data_path)]
    return [indexed.prefix for one in opened for indexed in (one.datasets if isinstance(one, PackingPlan) else [one])]


def data_fingerprint(data_path: list[str]) -> str:
    """Of the datasets and plans behind a --data-path; see `packing_plan.fingerprint` for what it tells and takes."""
    opened = (_open(path) for _, path in parse_data_path(data_path))
    parts = [one.fingerprint if isinstance(one, PackingPlan) else fingerprint(one) for one in opened]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _open(path: str) -> IndexedDataset | PackingPlan:
    if Path(path).is_dir() and not Path(f"{path}.idx").exists():
        return PackingPlan(path)
    return IndexedDataset(path)


def _contents(opened: IndexedDataset | PackingPlan) -> tuple[int, str, str]:
    """(how many, of what, where): what --split divides."""
    if isinstance(opened, PackingPlan):
        return len(opened), "sequence", str(opened.folder)
    return opened.num_documents, "document", opened.prefix


def _sequences(opened: IndexedDataset | PackingPlan, which: tuple[int, int], seq_length: int, seed: int) -> SequenceDataset:
    kind = PlanDataset if isinstance(opened, PackingPlan) else PackedDataset
    return kind(opened, which, seq_length, seed)


def _blend(packed: list[SequenceDataset], weights: list[float], seed: int) -> SequenceDataset:
    return packed[0] if len(packed) == 1 else BlendedDataset(packed, weights, seed)
