"""A packing on disk: which pieces of which documents make up each sequence, as memory-mapped arrays in a folder.

    plan/
      plan.json             seq_length, separator, the datasets with a fingerprint of each, counts, checksums of the arrays
      documents.npy         int64 [pieces]: document, counted over all datasets of the plan
      starts.npy            int64 [pieces]: first token of the piece in its document
      offsets.npy           int64 [pieces]: where the piece begins in its sequence; these are the cu_seqlens
      first_pieces.npy      int64 [sequences + 1]: sequence i is the pieces first_pieces[i] ... first_pieces[i + 1]
      filled.npy            int64 [sequences]: where the padding begins
      label_counts.npy      int64 [sequences]: tokens, from the first on, that have a label

Worked example, sequence 2 of the plan is  A A / B B B B B - - - -  (seq_length 12, separator /, A of 2 tokens, B of 5):

    plan.tokens(2, 0, 4)   A A / B         plan.borders(2)   0 3 8 12         plan.label_count(2)   7

A separator ends the piece before it. Padding is split into documents of at most PADDING_DOCUMENT tokens of its own, so that
attention spends nothing on it; no label is counted there. A sequence is found in constant time, and `tokens` reads only the
pages of the tokens asked for. A folder under its plain name is complete: it is written as plan.incomplete and renamed.

Datasets are found relative to the plan, so both can move together; the fingerprint is checked when the plan is opened.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacp.data.files import file_sha256, flush_to_disk, sync_folder
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.packing import Packing

PLAN_FILE = "plan.json"
FORMAT, VERSION = "megacp packing plan", 1
ARRAYS = ("documents", "starts", "offsets", "first_pieces", "filled", "label_counts")
INCOMPLETE = ".incomplete"
PADDING_DOCUMENT = 4096  # tokens
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 4096  # of .bin, for the fingerprint


def is_plan(path: str | os.PathLike) -> bool:
    return (Path(path) / PLAN_FILE).is_file()


def check_output_prefix(prefix: str) -> None:
    """Raises DatasetError where PREFIX.bin and .idx would not be found again by --data-path PREFIX."""
    if os.path.basename(prefix) in ("", ".", ".."):
        raise DatasetError(f"--output-prefix {prefix}: takes a folder and a name, such as {os.path.join(prefix, 'text')}")
    if prefix.endswith((".bin", ".idx")):
        raise DatasetError(f"--output-prefix {prefix}: takes the name without the ending: {prefix[:-4]}")
    if is_plan(prefix):
        raise DatasetError(f"--output-prefix {prefix} is a packing plan, which --data-path would read instead; name another prefix")


def fingerprint(indexed: IndexedDataset) -> str:
    """sha256 over the index, the size of .bin and 16 blocks of 4 KiB spread evenly over it: seconds for any dataset.

    Tells another dataset, another tokenizer, another order or a change of length; `inspect_data.py verify` reads every byte.
    """
    digest = hashlib.sha256()
    with open(indexed.idx_path, "rb") as index:
        while block := index.read(1 << 22):
            digest.update(block)
    size = indexed.bin_path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(indexed.bin_path, "rb") as tokens:
        for number in range(_SAMPLED_BLOCKS):
            tokens.seek(max(size - _BLOCK_BYTES, 0) * number // (_SAMPLED_BLOCKS - 1))
            digest.update(tokens.read(_BLOCK_BYTES))
    return digest.hexdigest()


def describe_datasets(datasets: list[IndexedDataset], folder: str | os.PathLike) -> list[dict]:
    """What plan.json says of each dataset."""
    return [
        {
            "prefix": os.path.relpath(os.path.realpath(indexed.prefix), os.path.realpath(folder)),
            "documents": indexed.num_documents,
            "tokens": indexed.num_tokens,
            "fingerprint": fingerprint(indexed),
        }
        for indexed in datasets
    ]


def write_plan(
    folder: str | os.PathLike,
    packing: Packing,
    datasets: list[dict],
    *,
    separator: int | None,
    padding: int,
    options: dict,
) -> None:
    """Write the folder, complete or not at all. `datasets` as `describe_datasets` gives them; separator and padding: token ids.

    The bytes depend on the arguments alone. Raises OSError, and then leaves nothing.
    """
    final, working = Path(folder), Path(f"{os.fspath(folder)}{INCOMPLETE}")
    shutil.rmtree(working, ignore_errors=True)  # left by a killed run
    working.mkdir(parents=True)
    try:
        checksums = {name: _write_array(working / f"{name}.npy", getattr(packing, name)) for name in ARRAYS}
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "seq_length": packing.accounting.seq_length,
            "separator": separator,
            "padding": padding,
            "datasets": datasets,
            "options": options,
            "counts": dataclasses.asdict(packing.accounting),
            "sha256": checksums,
        }
        with open(working / PLAN_FILE, "wb") as file:
            file.write(json.dumps(meta, indent=1).encode())
            flush_to_disk(file)
        sync_folder(working)
        os.rename(working, final)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    sync_folder(final.parent)


def read_meta(folder: str | os.PathLike) -> dict:
    """plan.json. Raises DatasetError naming it."""
    path = Path(folder) / PLAN_FILE
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        unfinished = Path(f"{os.fspath(folder)}{INCOMPLETE}").exists()
        reason = "; pack_documents.py was stopped before its end, run it again" if unfinished else ""
        raise DatasetError(f"{folder} is not a packing plan: no {PLAN_FILE} in it{reason}") from None
    except ValueError as error:
        raise DatasetError(f"{path}: not JSON ({error}); pack again with tools/pack_documents.py") from None
    if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise DatasetError(f"{path}: expected {FORMAT!r} version {VERSION}; pack again with tools/pack_documents.py")
    return meta


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of document `document` of `dataset`, at `offset` of a sequence."""

    dataset: IndexedDataset
    document: int  # of that dataset
    start: int
    length: int
    offset: int


class PackingPlan:
    """The plan in `folder` and its datasets, opened and checked against each other.

    Raises DatasetError: an array is missing or truncated, a dataset is missing or is not the one that was packed.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.meta = read_meta(folder)
        self.seq_length: int = self.meta["seq_length"]
        self.separator: int | None = self.meta["separator"]
        self.padding: int = self.meta["padding"]
        self._gap = 0 if self.separator is None else 1
        self.documents, self.starts, self.offsets, self.first_pieces, self.filled, self.label_counts = map(self._map_array, ARRAYS)
        self._check_shapes()
        self.datasets = [self._open_dataset(entry) for entry in self.meta["datasets"]]
        self.first_documents = np.cumsum([0, *(indexed.num_documents for indexed in self.datasets)])

    @property
    def fingerprint(self) -> str:
        """Of its arrays and datasets, wherever they lie; plans of equal sequences have the same."""
        contents = [self.meta["sha256"][name] for name in ARRAYS] + [entry["fingerprint"] for entry in self.meta["datasets"]]
        return hashlib.sha256(" ".join(map(str, [*contents, self.seq_length, self.separator, self.padding])).encode()).hexdigest()

    def _map_array(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            values = np.asarray(np.lib.format.open_memmap(path, mode="r"))
            if values.dtype != "<i8" or values.ndim != 1:
                raise ValueError(f"expected a list of int64, found {values.dtype} of shape {values.shape}")
        except (OSError, ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:  # numpy parses the header as Python
            raise DatasetError(f"{path}: missing or damaged ({error}); pack again with tools/pack_documents.py") from None
        return values

    def _check_shapes(self) -> None:
        sequences, pieces = len(self.filled), len(self.documents)
        lengths = {"starts": pieces, "offsets": pieces, "first_pieces": sequences + 1, "label_counts": sequences}
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                found = len(getattr(self, name))
                raise DatasetError(f"{self.folder / name}.npy: expected {length} values, found {found}; pack again")
        if sequences != self.meta["counts"]["sequences"] or self.first_pieces[-1] != pieces:
            raise DatasetError(f"{self.folder}: the arrays are not those of {PLAN_FILE}; pack again with tools/pack_documents.py")

    def _open_dataset(self, entry: dict) -> IndexedDataset:
        indexed = IndexedDataset(os.path.normpath(os.path.join(os.path.realpath(self.folder), entry["prefix"])))
        if fingerprint(indexed) != entry["fingerprint"]:
            raise DatasetError(
                f"{self.folder}: {indexed.prefix} is not the dataset that was packed: {indexed.num_documents} documents with "
                f"{indexed.num_tokens} tokens, packed were {entry['documents']} with {entry['tokens']}; pack it again with "
                "tools/pack_documents.py"
            )
        return indexed

    def __len__(self) -> int:
        return len(self.filled)

    def piece_lengths(self) -> np.ndarray:
        """int64 [pieces]: tokens of each piece. Made on each call."""
        stops = np.append(self.offsets[1:], 0)
        stops[self.first_pieces[1:] - 1] = self.filled + self._gap
        return stops - self._gap - self.offsets

    def pieces(self, sequence: int) -> list[Piece]:
        """What the sequence is made of, in its order."""
        return list(self._pieces_between(sequence, 0, self.seq_length))

    def _pieces_between(self, sequence: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that have tokens at [start, stop) of the sequence."""
        first, end = int(self.first_pieces[sequence]), int(self.first_pieces[sequence + 1])
        offsets = self.offsets[first:end]
        low = max(int(np.searchsorted(offsets, start, side="right")) - 1, 0)
        high = int(np.searchsorted(offsets, stop, side="left"))
        following = int(offsets[high]) if high < len(offsets) else int(self.filled[sequence]) + self._gap
        bounds = [*offsets[low:high].tolist(), following]
        where = zip(self.documents[first + low : first + high].tolist(), self.starts[first + low : first + high].tolist())
        for (document, begin), offset, following in zip(where, bounds, bounds[1:]):
            dataset = int(np.searchsorted(self.first_documents, document, side="right")) - 1
            local = document - int(self.first_documents[dataset])
            yield Piece(self.datasets[dataset], local, begin, following - self._gap - offset, offset)

    def tokens(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens [start, stop), 0 <= start <= stop <= seq_length + 1, of the sequence.

        Token seq_length is the next of the last piece's document where that goes on, else padding.
        """
        if not 0 <= start <= stop <= self.seq_length + 1:
            raise IndexError(f"{self.folder}: tokens [{start}, {stop}) of a sequence of {self.seq_length} tokens and one label")
        out = np.full(stop - start, self.padding, dtype=np.int64)
        if start == stop:
            return out
        follows = int(self.label_counts[sequence] == self.seq_length)  # a document that goes on has one token more to give
        for piece in self._pieces_between(sequence, min(start, self.seq_length - 1), min(stop, self.seq_length)):
            end = piece.offset + piece.length
            if self._gap and start <= end < min(stop, int(self.filled[sequence])):
                out[end - start] = self.separator
            low, high = max(start, piece.offset), min(stop, end + follows if end == self.seq_length else end)
            if low < high:
                shift = piece.start - piece.offset
                out[low - start : high - start] = piece.dataset.read_document(piece.document, low + shift, high + shift)
        return out

    def borders(self, sequence: int) -> np.ndarray:
        """int64: 0, each place where a piece begins or padding is parted, seq_length. Rises strictly."""
        first, end = int(self.first_pieces[sequence]), int(self.first_pieces[sequence + 1])
        padding = np.arange(int(self.filled[sequence]), self.seq_length, PADDING_DOCUMENT)
        return np.concatenate([self.offsets[first:end], padding, [self.seq_length]]).astype(np.int64, copy=False)

    def label_count(self, sequence: int) -> int:
        """Tokens of the sequence, from its first on, that have a label."""
        return int(self.label_counts[sequence])


def _write_array(path: Path, values: np.ndarray) -> str:
    """Returns the sha256 of the file."""
    with open(path, "wb") as file:
        np.save(file, np.ascontiguousarray(values, dtype="<i8"))
        flush_to_disk(file)
    return file_sha256(path)
