"""Reads every byte of a dataset or a plan and says whether it holds what it claims.

    verify_dataset("corpus", vocab_size=32000)     ["1,234 documents, 5,678,901 tokens, ids 0 to 31,999", ...]
    verify_plan("plan-5m")                         ["3 sequences ...: each of 15,000,000 tokens of the documents once", ...]

Opening either already checks the index against the file sizes; these read the rest. Both raise DatasetError with what is wrong.
"""

import numpy as np

from megacp.data.files import file_sha256
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.manifest import MANIFEST, read_manifest
from megacp.data.packing_plan import ARRAYS, PackingPlan

SCAN_TOKENS = 1 << 24  # looked at in one step of a scan


def verify_dataset(prefix: str, vocab_size: int | None = None) -> list[str]:
    """The index, the range of ids (below `vocab_size`, when given) and, when there is a manifest, both files' hashes."""
    indexed = IndexedDataset(prefix)
    low, high = token_range(indexed)
    empty = int(np.count_nonzero(indexed.document_lengths == 0))
    tokens = f"{indexed.num_tokens:,} tokens of {indexed.dtype.name}, ids {low:,} to {high:,}"
    if low < 0 and indexed.num_tokens:
        raise DatasetError(
            f"{indexed.bin_path}: token id {low} is negative; the ids are stored in the wrong type; preprocess again"
        )
    _check_vocab_size(str(indexed.bin_path), high, vocab_size)
    return [f"{prefix}: {indexed.num_documents:,} documents ({empty:,} empty), {tokens}", *_verify_manifest(indexed)]


def _check_vocab_size(where: str, token: int, vocab_size: int | None) -> None:
    if vocab_size is not None and token >= vocab_size:
        raise DatasetError(f"{where}: token id {token} is outside --vocab-size {vocab_size}; {token + 1} or more holds it")


def token_range(indexed: IndexedDataset) -> tuple[int, int]:
    """(smallest, largest) id of the file; (0, -1) when it holds none."""
    low, high = 0, -1
    with open(indexed.bin_path, "rb") as file:
        while len(chunk := np.fromfile(file, indexed.dtype, SCAN_TOKENS)):
            least, most = int(chunk.min()), int(chunk.max())
            low, high = (least, most) if high < low else (min(low, least), max(high, most))
    return low, high


def _verify_manifest(indexed: IndexedDataset) -> list[str]:
    manifest = read_manifest(indexed.prefix)
    if manifest is None:
        return [f"no {MANIFEST} to compare hashes with"]
    for ending, file in (("bin", indexed.bin_path), ("idx", indexed.idx_path)):
        expected, found = manifest.output.get("sha256", {}).get(ending), file_sha256(file)
        if found != expected:
            raise DatasetError(f"{file}: sha256 {found}, the {MANIFEST} beside it has {expected}; it was changed since")
    return [f"sha256 of .bin and .idx are those of the {MANIFEST} beside them"]


def common_tokenizer(prefixes: list[str]) -> dict | None:
    """What the manifests say of the tokenizer; None without any. Raises DatasetError when they name different ones."""
    made = {}
    for prefix in prefixes:
        if (manifest := read_manifest(prefix)) is not None:
            made.setdefault(manifest.tokenizer["sha256"], (prefix, manifest.tokenizer))
    if len(made) > 1:
        (one, first), (other, second) = list(made.values())[:2]
        raise DatasetError(
            f"--input {one} was made with {first['type']} {first['model'] or ''} (sha256 {first['sha256'][:12]}), {other} with "
            f"{second['type']} {second['model'] or ''} (sha256 {second['sha256'][:12]}): the same id means another text in each; "
            "preprocess them with one tokenizer"
        )
    return next((tokenizer for _, tokenizer in made.values()), None)


def verify_plan(folder: str, vocab_size: int | None = None) -> list[str]:
    """Checksums, the datasets, the arrays among each other, and that every token of the documents is there once.

    With `vocab_size` also that all ids, of the datasets, the separator and the padding, are below it.
    """
    plan = PackingPlan(folder)
    if vocab_size is not None:
        for indexed in plan.datasets:
            _check_vocab_size(str(indexed.bin_path), token_range(indexed)[1], vocab_size)
        for name, token in (("separator", plan.separator), ("padding", plan.padding)):
            _check_vocab_size(f"{folder}: {name}", -1 if token is None else token, vocab_size)
    for name in ARRAYS:
        path = plan.folder / f"{name}.npy"
        if file_sha256(path) != plan.meta["sha256"][name]:
            raise DatasetError(f"{path}: changed since it was written; pack again with tools/pack_documents.py")
    _require(plan, plan.first_pieces[0] == 0 and (np.diff(plan.first_pieces) > 0).all(), "a sequence without pieces")
    lengths = plan.piece_lengths()
    _require(plan, (plan.offsets[plan.first_pieces[:-1]] == 0).all(), "a sequence that does not begin with a piece")
    _require(plan, (lengths > 0).all() and (plan.filled <= plan.seq_length).all(), "a piece that overlaps the next or the border")

    stored = np.concatenate([indexed.document_lengths for indexed in plan.datasets])
    order = np.lexsort((plan.starts, plan.documents))
    documents, starts, stops = plan.documents[order], plan.starts[order], (plan.starts + lengths)[order]
    _require(plan, documents[0] >= 0 and documents[-1] < len(stored), "a document that is not there")
    _require(plan, (starts >= 0).all() and (stops <= stored[documents]).all(), "a piece outside its document")
    same = documents[1:] == documents[:-1]
    _require(plan, (stops[:-1][same] <= starts[1:][same]).all(), "tokens that come twice")

    counts = plan.meta["counts"]
    packed = int(lengths.sum())
    _require(plan, packed == counts["packed_tokens"], f"{packed} tokens where plan.json counts {counts['packed_tokens']}")
    missing = counts["document_tokens"] - packed
    left_out = counts["short_tokens"] + counts["emptier_tokens"]
    _require(plan, missing == left_out, f"{missing} tokens missing, of which {left_out} were to be left out")
    last = plan.first_pieces[1:] - 1
    goes_on = (plan.filled == plan.seq_length) & ((plan.starts + lengths)[last] < stored[plan.documents[last]])
    _require(plan, (plan.label_counts == plan.filled - 1 + goes_on).all(), "a wrong number of labels")
    return [
        f"{folder}: {len(plan):,} sequences of {plan.seq_length:,} tokens from {len(plan.datasets)} datasets",
        f"each of {packed:,} tokens comes once; {left_out:,} were left out as asked; {int(plan.label_counts.sum()):,} labels",
        "checksums of the arrays and fingerprints of the datasets hold",
    ]


def _require(plan: PackingPlan, holds: bool, otherwise: str) -> None:
    if not holds:
        raise DatasetError(f"{plan.folder}: {otherwise}; pack again with tools/pack_documents.py")
