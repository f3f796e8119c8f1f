"""Several .bin/.idx datasets as one, as Megatron's own merge writes it.

    a: documents [5 6 7] [8]        b: documents [9]        merged: [5 6 7] [8] [9]

Tokens are copied as they lie; when datasets store ids in different types (a small and a large vocabulary), all are stored in
the widest. The two files appear together and complete, the index last.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacp.data.indexed_dataset import DTYPES, HEADER, MAGIC, VERSION, DatasetError, IndexedDataset

_COPY_BYTES = 1 << 24


def merge_datasets(prefixes: list[str], output: str, progress: Callable[[str], None] = lambda line: None) -> IndexedDataset:
    """Write `output`.bin and .idx; `progress` gets a line for each dataset copied. Memory: 20 bytes a document.

    Raises DatasetError naming the file, OSError when the disk is full; then nothing is left.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    for ending in ("bin", "idx"):
        if Path(f"{output}.{ending}").exists():
            raise DatasetError(f"--output-prefix {output}: {output}.{ending} exists; remove it or name another prefix")
    dtype = np.result_type(*(indexed.dtype for indexed in datasets)).newbyteorder("<")
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    temporary = {ending: Path(f"{output}.{ending}.{os.getpid()}.tmp") for ending in ("bin", "idx")}
    try:
        with open(temporary["bin"], "wb") as tokens:
            for indexed in datasets:
                _copy_tokens(indexed, tokens, dtype)
                progress(f"{indexed.prefix}: {indexed.num_documents:,} documents, {indexed.num_tokens:,} tokens")
            tokens.flush()
            os.fsync(tokens.fileno())
        with open(temporary["idx"], "wb") as index:
            _write_index(datasets, index, dtype, code)
            index.flush()
            os.fsync(index.fileno())
        for ending in ("bin", "idx"):
            os.replace(temporary[ending], f"{output}.{ending}")
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return IndexedDataset(output)


def _copy_tokens(indexed: IndexedDataset, tokens, dtype: np.dtype) -> None:
    with open(indexed.bin_path, "rb") as source:
        if indexed.dtype == dtype:
            shutil.copyfileobj(source, tokens, _COPY_BYTES)
            return
        while block := source.read(_COPY_BYTES):
            tokens.write(np.frombuffer(block, dtype=indexed.dtype).astype(dtype).data)


def _write_index(datasets: list[IndexedDataset], index, dtype: np.dtype, code: int) -> None:
    sequences = sum(len(indexed.sequence_lengths) for indexed in datasets)
    documents = sum(indexed.num_documents for indexed in datasets)
    index.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
    for indexed in datasets:
        index.write(indexed.sequence_lengths.tobytes())
    first_byte = 0
    for indexed in datasets:
        pointers = indexed.sequence_pointers // indexed.dtype.itemsize * dtype.itemsize + first_byte
        index.write(pointers.astype("<i8").data)
        first_byte += indexed.bin_path.stat().st_size // indexed.dtype.itemsize * dtype.itemsize
    index.write(np.zeros(1, dtype="<i8").data)
    first_sequence = 0
    for indexed in datasets:
        index.write((indexed.document_indices[1:] + first_sequence).astype("<i8").data)
        first_sequence += len(indexed.sequence_lengths)
