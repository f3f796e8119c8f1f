"""Several .bin/.idx datasets as one, as Megatron's own merge writes it.

    a: documents [5 6 7] [8]        b: documents [9]        merged: [5 6 7] [8] [9]

Tokens are copied as they lie; when datasets store ids in different types (a small and a large vocabulary), all are stored in
the widest. When all have a manifest, so has the result; when all have groups, so has the result. The files get their names
when they are complete, the index last.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacp.data.document_groups import groups_beside
from megacp.data.files import file_sha256, flush_to_disk
from megacp.data.indexed_dataset import DTYPES, HEADER, MAGIC, VERSION, DatasetError, IndexedDataset
from megacp.data.manifest import MANIFEST, Manifest, read_manifest
from megacp.data.packing_plan import check_output_prefix
from megacp.data.verification import common_tokenizer

_COPY_BYTES = 1 << 24


def merge_datasets(prefixes: list[str], output: str, progress: Callable[[str], None] = lambda line: None) -> IndexedDataset:
    """Write `output`.bin and .idx; `progress` gets a line for each dataset copied. Memory: 20 bytes a document.

    Raises DatasetError naming the file, OSError when the disk is full; then nothing is left.
    """
    check_output_prefix(output)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    endings = (".bin", ".groups", MANIFEST, ".idx")
    for path in (Path(f"{output}{ending}") for ending in endings):
        if path.exists():
            raise DatasetError(f"--output-prefix {output}: {path} exists; remove it or name another prefix")
    tokenizer = common_tokenizer(prefixes)
    dtype = np.result_type(*(indexed.dtype for indexed in datasets)).newbyteorder("<")
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    temporary = {ending: Path(f"{output}{ending}.{os.getpid()}.tmp") for ending in endings}
    try:
        with open(temporary[".bin"], "wb") as tokens:
            for indexed in datasets:
                _copy_tokens(indexed, tokens, dtype)
                progress(f"{indexed.prefix}: {indexed.num_documents:,} documents, {indexed.num_tokens:,} tokens")
            flush_to_disk(tokens)
        with open(temporary[".idx"], "wb") as index:
            _write_index(datasets, index, dtype, code)
            flush_to_disk(index)
        groups = [groups_beside(prefix) for prefix in prefixes]
        if all(groups):
            _concatenate(groups, temporary[".groups"])
        manifests = [read_manifest(prefix) for prefix in prefixes]
        if all(manifests):
            hashes = {ending: file_sha256(temporary[f".{ending}"]) for ending in ("bin", "idx")}
            merged = _merged_manifest(manifests, tokenizer, dtype, hashes)
            temporary[MANIFEST].write_text(merged.to_json(), encoding="utf-8")
        for ending in endings:
            if temporary[ending].exists():
                os.replace(temporary[ending], f"{output}{ending}")
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


def _concatenate(sources: list[Path], output: Path) -> None:
    """The lines of all `sources`; the last of each may lack its newline."""
    with open(output, "wb") as joined:
        for path in sources:
            with open(path, "rb") as source:
                shutil.copyfileobj(source, joined, _COPY_BYTES)
                source.seek(max(0, source.tell() - 1))
                if source.read(1) not in (b"", b"\n"):  # else the next source's first line would be part of this one's last
                    joined.write(b"\n")


def _merged_manifest(manifests: list[Manifest], tokenizer: dict, dtype: np.dtype, hashes: dict[str, str]) -> Manifest:
    counts = sum((Counter(manifest.counts) for manifest in manifests), Counter())
    return Manifest(
        tokenizer=tokenizer,
        options={"merged": [manifest.options for manifest in manifests]},
        inputs=[source for manifest in manifests for source in manifest.inputs],
        counts={name: counts[name] for name in manifests[0].counts},
        skipped_names=[name for manifest in manifests for name in manifest.skipped_names],
        output={
            "dtype": dtype.name,
            "documents": sum(manifest.output["documents"] for manifest in manifests),
            "tokens": sum(manifest.output["tokens"] for manifest in manifests),
            "sha256": hashes,
        },
    )
