"""A dataset that is being written and survives a kill at any moment: what is done is in PREFIX.partial, and is gone on from.

    with PartialDataset("data/corpus", np.uint16, options={"append_eod": True}) as partial:
        partial.last                       None, or what the last checkpoint before the kill was given
        partial.append(ids); partial.end_document()
        partial.checkpoint({"source": 3, "documents": 120})
        partial.publish(manifest)          PREFIX.bin, .idx and .manifest.json appear, PREFIX.partial goes

PREFIX.partial holds the tokens, the tables that grow with them, and journal.jsonl: the options and whether --restart began it, then
a line for each checkpoint with the sizes of the other files. A checkpoint brings all files to the disk before its line, so that the
sizes of the last whole line are true after a kill or a power cut; what lies behind them is cut off.
"""

import array
import json
import os
import shutil
from pathlib import Path

import numpy as np

from megacp.data.files import file_sha256, flush_to_disk, sync_folder
from megacp.data.indexed_dataset import DatasetError, IndexedDatasetBuilder
from megacp.data.manifest import MANIFEST, Manifest
from megacp.file_lock import Locked, lock_file

DIGEST_BYTES = 16


class PartialDataset(IndexedDatasetBuilder):
    """Resumes what PREFIX.partial holds, when it was begun with the same `options`; `restart` throws it away.

    may_replace: `restart` was given, now or when what is gone on from was begun: another dataset of the name was given up for this.
    Raises DatasetError when other options began it, or another process is writing it.
    """

    def __init__(self, prefix: str, dtype: np.dtype, options: dict, restart: bool = False):
        self.folder = Path(f"{prefix}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.folder / "lock")
        except Locked as other:
            raise DatasetError(f"--output-prefix {prefix}: another process is writing {self.folder} ({other}); wait for it") from None
        except OSError as error:
            raise DatasetError(f"--output-prefix {prefix}: cannot be written ({error}); a folder of your own works") from None
        try:
            self._begin(prefix, dtype, options, restart)
        except BaseException:
            self._unlock()
            raise

    def _begin(self, prefix: str, dtype: np.dtype, options: dict, restart: bool) -> None:
        self._journal_path = self.folder / "journal.jsonl"
        records, journal_bytes = ([], 0) if restart else _read_journal(self._journal_path)
        if records:
            _check_options(prefix, records[0]["options"], options)
        self.records: list[dict] = records[1:]  # of the checkpoints so far
        self.last: dict | None = self.records[-1] if self.records else None
        self.digests: set[bytes] = set()  # what was seen, for documents that come twice
        sizes = self.last["sizes"] if self.last else dict.fromkeys(("tokens", "lengths", "documents", "digests", "groups"), 0)
        self.may_replace = restart or (self.last is not None and records[0].get("restart", False))
        self.is_complete = self.last is not None and "manifest" in self.last  # only its names are missing
        self._done = False
        self._tables = {}
        self._journal = open(self._journal_path, "r+b" if records else "w+b")
        self._journal.seek(journal_bytes)
        self._journal.truncate()
        IndexedDatasetBuilder.__init__(self, prefix, dtype)
        if self.is_complete:
            return
        self._tables = {name: _open_at(self.folder / name, size) for name, size in sizes.items() if name != "tokens"}
        self._load(sizes)
        if not records:
            self._journal.write(json.dumps({"options": options, "restart": restart}).encode() + b"\n")
            flush_to_disk(self._journal)
            sync_folder(self.folder)

    def _open_files(self) -> None:
        self._bin_temporary, self._idx_temporary = self.folder / "tokens", self.folder / "index"
        size = self.last["sizes"]["tokens"] if self.last else 0
        self._bin = open(os.devnull, "wb") if self.is_complete else _open_at(self._bin_temporary, size)

    def _load(self, sizes: dict[str, int]) -> None:
        """The tables into memory: 12 bytes a document, and about 100 for those that are compared."""
        self._lengths = array.array("i", self._tables["lengths"].read())
        self._document_indices = array.array("q", [0])
        self._document_indices.frombytes(self._tables["documents"].read())
        self.num_tokens = sizes["tokens"] // self.dtype.itemsize
        digests = self._tables["digests"].read()
        self.digests = {digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)}
        self._tables["groups"].seek(0, os.SEEK_END)
        self._saved = (len(self._lengths), len(self._document_indices))

    def __exit__(self, *exception) -> None:
        for file in (self._bin, self._journal, *self._tables.values()):
            file.close()
        if self._done or self.last is None:  # nothing here that a later run could use
            shutil.rmtree(self.folder)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:  # None: the file system has no locks
            self._lock.close()

    def add_digest(self, digest: bytes) -> bool:
        """False when it is there already."""
        if digest in self.digests:
            return False
        self.digests.add(digest)
        self._tables["digests"].write(digest)
        return True

    def add_group(self, line: str) -> None:
        self._tables["groups"].write(line.encode("utf-8") + b"\n")

    def checkpoint(self, record: dict) -> None:
        """Make all documents so far, none of them open, and `record` safe on disk."""
        lengths, indices = self._saved
        self._tables["lengths"].write(self._lengths[lengths:].tobytes())
        self._tables["documents"].write(self._document_indices[indices:].tobytes())
        self._saved = (len(self._lengths), len(self._document_indices))
        flush_to_disk(self._bin)
        for table in self._tables.values():
            flush_to_disk(table)
        sizes = {"tokens": self._bin.tell(), **{name: table.tell() for name, table in self._tables.items()}}
        self._note({**record, "sizes": sizes})

    def _note(self, record: dict) -> None:
        self._journal.write(json.dumps(record).encode() + b"\n")
        flush_to_disk(self._journal)
        self.records.append(record)
        self.last = record

    def discard(self) -> None:
        """Nothing here is of use to a later run."""
        self._done = True

    def publish(self, manifest: Manifest | None = None, groups: bool = False) -> Manifest:
        """The dataset under its names. `manifest` lacks the output's part; None where an earlier run was killed while publishing."""
        if not self.is_complete:
            self._write_out()
            manifest.output = {
                "dtype": self.dtype.name,
                "documents": self.num_documents,
                "tokens": self.num_tokens,
                "sha256": {"bin": file_sha256(self._bin_temporary), "idx": file_sha256(self._idx_temporary)},
            }
            (self.folder / "manifest").write_text(manifest.to_json(), encoding="utf-8")
            for name in ("groups", "manifest"):
                with open(self.folder / name, "rb") as file:
                    os.fsync(file.fileno())
            self._note({"manifest": manifest.to_dict(), "groups": groups, "sizes": self.last["sizes"]})
        files = [
            ("tokens", ".bin"),
            *([("groups", ".groups")] if self.last["groups"] else []),
            ("manifest", MANIFEST),
            ("index", ".idx"),
        ]
        if (self.folder / "index").exists():  # an old index must never meet new tokens
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for name, ending in files:
            if (self.folder / name).exists():
                os.replace(self.folder / name, f"{self.prefix}{ending}")
        if not self.last["groups"]:  # those of an older dataset of this name are not this one's
            Path(f"{self.prefix}.groups").unlink(missing_ok=True)
        sync_folder(self.folder.parent)
        self._done = True
        return Manifest.from_dict(self.last["manifest"])


def _read_journal(path: Path) -> tuple[list[dict], int]:
    """The whole lines, and how many bytes they take; a kill may have left part of a line behind them."""
    records, size = [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        records.append(record)
        size += len(line)
    return records, size


def _check_options(prefix: str, begun: dict, options: dict) -> None:
    options = json.loads(json.dumps(options))
    for name in sorted(begun.keys() | options.keys()):
        if begun.get(name) != options.get(name):
            raise DatasetError(
                f"{prefix}.partial was begun with {name} {begun.get(name)}, now it is {options.get(name)}; take the same options to go "
                "on, or --restart to begin anew"
            )


def _open_at(path: Path, size: int):
    """The file for reading and writing on, cut to `size` bytes, at its beginning (tables) or end (tokens)."""
    file = open(path, "r+b" if path.exists() else "w+b")
    found = file.seek(0, os.SEEK_END)
    if found < size:
        raise DatasetError(f"{path}: expected at least {size} bytes, found {found}; it was damaged: begin anew with --restart")
    file.truncate(size)
    file.seek(size if path.name == "tokens" else 0)
    return file
