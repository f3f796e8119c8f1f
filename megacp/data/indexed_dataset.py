"""Token ids on disk in Megatron's .bin/.idx format, byte for byte. The index is mapped into memory, tokens are read as asked for.

Two documents, [5, 6, 7] and [8], written with a vocabulary of 256 (so uint16) are

    x.bin   05 00 06 00 07 00 08 00                            the ids, one after the other
    x.idx   "MMIDIDX\\0\\0"  u64 version 1  u8 dtype 8 (uint16)
            u64 2 sequences  u64 3 document indices
            i32 lengths 3 1  i64 byte offsets 0 6  i64 document indices 0 1 2

    with IndexedDatasetBuilder("x", best_dtype(256)) as builder:
        builder.add_document([5, 6, 7])
        builder.add_document([8])
        builder.finalize()
    IndexedDataset("x").read(0, 1, 3)         -> [6, 7]

A document is a run of sequences, document_indices[d] up to document_indices[d + 1]. Megatron stores lengths as int32, so a
document of more than 2^31 - 1 tokens is stored as several sequences. Every offset and count here is int64.
"""

import array
import os
import struct
from pathlib import Path

import numpy as np

from megacp.data.files import flush_to_disk

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices (documents + 1)
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
MAX_SEQUENCE_TOKENS = 2**31 - 1  # lengths are int32 in the file


class DatasetError(ValueError):
    """The data on disk, or a flag about it, cannot be used. The message names the file or flag and what would work."""


def best_dtype(vocab_size: int) -> np.dtype:
    """uint16 when the vocabulary is below 65,500 ids, else int32 (Megatron's rule)."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """The documents under `prefix`.bin and `prefix`.idx. Opening checks every field of the index against the file sizes.

    Raises DatasetError naming the file, what was expected and what was found.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        self.bin_path, self.idx_path = Path(f"{self.prefix}.bin"), Path(f"{self.prefix}.idx")
        self._check_files_exist()
        self._read_index()
        self._check_index()
        self._bin = open(self.bin_path, "rb", buffering=0)  # not mapped: a page that cannot be read would end the process by SIGBUS

    def _check_files_exist(self) -> None:
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                hint = ""
                if self.prefix.endswith((".bin", ".idx")):
                    hint = f"; --data-path takes the prefix without the ending: {self.prefix[:-4]}"
                raise DatasetError(f"{path} does not exist; a dataset is {self.bin_path} with {self.idx_path}{hint}")

    def _read_index(self) -> None:
        raw = _memory_map(self.idx_path)
        if len(raw) < HEADER.size:
            raise DatasetError(f"{self.idx_path}: expected a header of {HEADER.size} bytes, found {len(raw)} bytes in all")
        magic, version, code, sequences, indices = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise DatasetError(f"{self.idx_path}: expected a Megatron index that begins with {MAGIC!r}, found {magic!r}")
        if version != VERSION:
            raise DatasetError(f"{self.idx_path}: expected version {VERSION}, found {version}")
        dtype = DTYPES.get(code)
        if dtype is None or not np.issubdtype(dtype, np.integer):
            known = ", ".join(f"{c} {np.dtype(t).name}" for c, t in DTYPES.items() if np.issubdtype(t, np.integer))
            raise DatasetError(f"{self.idx_path}: expected the dtype code of an integer ({known}), found {code}")
        expected = HEADER.size + sequences * (4 + 8) + indices * 8
        if len(raw) != expected:
            raise DatasetError(
                f"{self.idx_path}: expected {expected} bytes for {sequences} sequences and {indices} document indices, "
                f"found {len(raw)}; the file is {'truncated' if len(raw) < expected else 'longer than its header says'}"
            )
        self.dtype = np.dtype(dtype).newbyteorder("<")
        offset = HEADER.size
        self.sequence_lengths = raw[offset : offset + 4 * sequences].view("<i4")  # tokens
        offset += 4 * sequences
        self.sequence_pointers = raw[offset : offset + 8 * sequences].view("<i8")  # bytes into .bin
        self.document_indices = raw[offset + 8 * sequences :].view("<i8")  # sequences

    def _check_index(self) -> None:
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        if (lengths < 0).any():
            bad = int(np.argmax(lengths < 0))
            raise DatasetError(f"{self.idx_path}: expected lengths of at least 0, found {lengths[bad]} for sequence {bad}")
        bin_bytes = self.bin_path.stat().st_size
        ends = pointers + lengths.astype(np.int64) * self.dtype.itemsize
        outside = (pointers < 0) | (pointers % self.dtype.itemsize != 0) | (ends > bin_bytes) | (ends < 0)
        if outside.any():
            bad = int(np.argmax(outside))
            raise DatasetError(
                f"{self.bin_path}: the index puts sequence {bad} ({lengths[bad]} tokens of {self.dtype.name}) at bytes "
                f"{pointers[bad]} to {ends[bad]}, but the file has {bin_bytes} bytes; it is truncated or is not the "
                f".bin that belongs to {self.idx_path}"
            )
        described = int(ends.max(initial=0))
        if described != bin_bytes:
            raise DatasetError(
                f"{self.bin_path}: expected {described} bytes from {self.idx_path}, found {bin_bytes}; the two files do not "
                "belong together"
            )
        whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
        if not whole or (np.diff(documents) < 0).any():
            ends_of = f"{documents[0]} .. {documents[-1]}" if len(documents) else "none"
            raise DatasetError(
                f"{self.idx_path}: expected document indices that rise from 0 to {len(lengths)} (the sequences), found "
                f"{ends_of}{'' if not whole else ' with a step down'}"
            )

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.sequence_lengths.sum(dtype=np.int64))

    @property
    def document_lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each document. Made on each call, 8 bytes a sequence and a document."""
        tokens_before = np.zeros(len(self.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, dtype=np.int64, out=tokens_before[1:])
        return np.diff(tokens_before[self.document_indices])

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of one sequence. Raises DatasetError naming the file when it is shorter by now, or cannot be read."""
        length = int(self.sequence_lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.bin_path}: tokens [{start}, {stop}) of sequence {sequence}, which has {length}")
        tokens_n = np.empty(stop - start, self.dtype)
        place, left = int(self.sequence_pointers[sequence]) + start * self.dtype.itemsize, memoryview(tokens_n.view(np.uint8))
        while left:  # a call reads less than 2 GiB
            try:
                count = os.preadv(self._bin.fileno(), [left], place)
            except OSError as error:
                raise DatasetError(f"{self.bin_path}: byte {place} cannot be read ({error.strerror})") from error
            if count == 0:
                raise DatasetError(f"{self.bin_path} now ends before byte {place}; it was longer when the run began")
            place, left = place + count, left[count:]
        return tokens_n

    def read_document(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of one document, over its sequences."""
        first, last = int(self.document_indices[document]), int(self.document_indices[document + 1])
        pieces, begin = [], 0  # begin: the sequence's first token, counted in the document
        for sequence in range(first, last):
            end = begin + int(self.sequence_lengths[sequence])
            if start < end and stop > begin:
                pieces.append(self.read(sequence, max(start - begin, 0), min(stop, end) - begin))
            begin = end
        if not 0 <= start <= stop <= begin:
            raise IndexError(f"{self.bin_path}: tokens [{start}, {stop}) of document {document}, which has {begin}")
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])


class IndexedDatasetBuilder:
    """Writes `prefix`.bin and `prefix`.idx. They appear under these names only at `finalize`, complete.

    Until then the data lies in `prefix`.bin.<pid>.tmp; leaving a `with` block without `finalize` removes it.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype, max_sequence_tokens: int = MAX_SEQUENCE_TOKENS):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, known in DTYPES.items() if np.dtype(known) == np.dtype(dtype)), None)
        if self._code is None or not np.issubdtype(self.dtype, np.integer):
            raise DatasetError(f"{self.prefix}: token ids cannot be stored as {np.dtype(dtype)}; uint16 and int32 can")
        self._max_sequence_tokens = max_sequence_tokens
        self._lengths = array.array("i")  # tokens of each sequence
        self._document_indices = array.array("q", [0])
        self.num_tokens = 0  # of the documents that have ended
        self.open_tokens = 0  # of the document that has not
        self._open_files()

    def _open_files(self) -> None:
        self._bin_temporary = Path(f"{self.prefix}.bin.{os.getpid()}.tmp")
        self._idx_temporary = Path(f"{self.prefix}.idx.{os.getpid()}.tmp")
        self._bin = open(self._bin_temporary, "wb")

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, *exception) -> None:
        self._bin.close()
        self._bin_temporary.unlink(missing_ok=True)  # already renamed when finalized
        self._idx_temporary.unlink(missing_ok=True)

    def add_document(self, ids) -> None:
        """Append one document: a list or 1-D array of token ids, possibly empty."""
        self.append(ids)
        self.end_document()

    def append(self, ids) -> None:
        """Append tokens to the document that is open; `end_document` or `drop_document` closes it."""
        ids_n = np.asarray(ids)
        limits = np.iinfo(self.dtype)
        if len(ids_n) and not (limits.min <= ids_n.min() and ids_n.max() <= limits.max):
            raise DatasetError(
                f"{self.prefix}: document {self.num_documents} has ids {ids_n.min()} to {ids_n.max()}, which "
                f"{self.dtype.name} cannot hold; take best_dtype(vocab_size)"
            )
        self._bin.write(np.ascontiguousarray(ids_n.astype(self.dtype, copy=False)).data)
        self.open_tokens += len(ids_n)

    def end_document(self) -> None:
        full, rest = divmod(self.open_tokens, self._max_sequence_tokens)
        self._lengths.extend([self._max_sequence_tokens] * full + [rest] * (rest > 0 or not full))
        self._document_indices.append(len(self._lengths))
        self.num_tokens += self.open_tokens
        self.open_tokens = 0

    def drop_document(self) -> None:
        """Take back what was appended since the last document ended."""
        self._bin.flush()
        self._bin.seek(self.num_tokens * self.dtype.itemsize)
        self._bin.truncate()
        self.open_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._document_indices) - 1

    def finalize(self) -> None:
        """Write the index and give both files their names, the index last: with an index, the dataset is whole."""
        self._write_out()
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # an old index must never meet the new tokens
        os.replace(self._bin_temporary, f"{self.prefix}.bin")
        os.replace(self._idx_temporary, f"{self.prefix}.idx")

    def _write_out(self) -> None:
        """Both files complete on disk, under their temporary names."""
        flush_to_disk(self._bin)
        self._bin.close()
        lengths = np.array(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        with open(self._idx_temporary, "wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._document_indices)))
            idx.write(lengths.astype("<i4").data)
            idx.write((pointers * self.dtype.itemsize).astype("<i8").data)
            idx.write(np.array(self._document_indices, dtype="<i8").data)
            flush_to_disk(idx)


def _memory_map(path: Path) -> np.ndarray:
    """The bytes of a file, uint8 [bytes], read-only; an empty file cannot be mapped and is an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
