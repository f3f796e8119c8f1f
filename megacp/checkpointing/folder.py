"""Checkpoint folders on disk: complete or absent, whenever the writer is killed.

    checkpoints/
      iter_0000010/                      complete, because it was written under the name below and then renamed
        .metadata  __0_0.distcp  __1_0.distcp     torch's distributed checkpoint, one data file per rank
        trainer_state.json
        manifest.json                             bytes and crc32 of every file above
      iter_0000020.incomplete/           in the making, or left by a killed run: never read, removed by the next save
      latest_checkpointed_iteration.txt  "10": Megatron's tracker, for people and tools

A folder counts when it has its plain name and a manifest. The newest is the one saved last: manifests number the
saves, so a run that went back to iteration 10 and then saved 15 continues from 15, though iteration 20 of the
abandoned attempt is still there. The tracker is not what decides, because a run may be killed between the rename
and the tracker's update.

When iteration 10 is saved again, the former folder is `iter_0000010.replaced` between two renames. It still counts
while the plain name is absent.

Everything here is the work of one process on one directory; `distributed` makes ranks agree around it.
"""

import errno
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megacp.checkpointing.agreement import RankFailure, describe_error

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
READ_BYTES = 16 * 2**20


class DamagedFile(RankFailure):
    """A file of a checkpoint is absent or not as it was written. The text names it and says what is wrong."""


@dataclass(frozen=True)
class FileRecord:
    """How long a file is, and zlib's crc32 of it as 8 hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """`world_size` ranks wrote the files; `save_number`, which `publish` sets, counts the saves into a directory."""

    iteration: int
    world_size: int
    files: dict[str, FileRecord]
    save_number: int = 0

    def write(self, folder: Path) -> None:
        """The file begins with the checksum of its own contents."""
        text = json.dumps(asdict(self), indent=1)
        write_durably(folder / MANIFEST, f"{zlib.crc32(text.encode()):08x}\n{text}")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises DamagedFile when it is absent or is not a manifest."""
        try:
            crc32, _, text = (folder / MANIFEST).read_bytes().partition(b"\n")
        except OSError as error:
            raise DamagedFile(f"{MANIFEST} cannot be read ({describe_error(error)})") from error
        if crc32 != b"%08x" % zlib.crc32(text):
            raise DamagedFile(f"{MANIFEST} is damaged: its own checksum does not hold")
        fields = json.loads(text)
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return cls(files=files, **fields)


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_checkpoint(path: Path) -> bool:
    """Whether it is itself one of the folders that `complete_checkpoints` finds in its parent."""
    return re.fullmatch(r"iter_\d{7,}", path.absolute().name) is not None and (path / MANIFEST).is_file()


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """The folders that count by iteration, saved first to saved last. One with a damaged manifest comes last."""
    found: dict[int, Path] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = re.fullmatch(rf"iter_(\d{{7,}})({re.escape(REPLACED)})?", path.name)
        if match and (path / MANIFEST).is_file():
            iteration, is_replaced = int(match[1]), match[2] is not None
            if not (is_replaced and iteration in found):
                found[iteration] = path
    return dict(sorted(found.items(), key=lambda item: (_save_number(item[1]), item[0])))


def _save_number(folder: Path) -> float:
    try:
        return Manifest.read(folder).save_number
    except DamagedFile:
        return float("inf")  # load_checkpoint says what is wrong with it; to pass over it silently would lose work


def begin(directory: Path, iteration: int) -> Path:
    """Makes the empty folder to write into, after removing what killed runs left. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / folder_name(iteration)
    if final.exists() and not (final / MANIFEST).is_file():
        raise FileExistsError(f"{final} exists and is not a complete checkpoint: move it away or save elsewhere")
    for path in directory.glob(f"iter_*{INCOMPLETE}"):
        shutil.rmtree(path)
    for path in directory.glob(f"iter_*{REPLACED}"):
        if (path.with_suffix("") / MANIFEST).is_file():
            discard(path)
    working = directory / (folder_name(iteration) + INCOMPLETE)
    working.mkdir()
    return working


def publish(directory: Path, manifest: Manifest) -> Path:
    """Turns the folder that `begin` made, all files in it written, into a checkpoint. Returns its final path.

    From the second rename on it is the newest.
    """
    final = directory / folder_name(manifest.iteration)
    working = final.with_name(final.name + INCOMPLETE)
    for name, record in manifest.files.items():
        size = (working / name).stat().st_size  # a file of another host may be missing: --save must be one file system
        if size != record.bytes:
            raise OSError(f"{working / name} has {size} bytes where {record.bytes} were written")
    replace(manifest, save_number=_next_save_number(directory)).write(working)
    if final.exists():
        os.rename(final, final.with_name(final.name + REPLACED))
    os.rename(working, final)
    sync_directory(directory)
    try:
        write_durably(directory / TRACKER, f"{manifest.iteration}\n")
    except OSError as error:  # it decides nothing, and the checkpoint is there
        warnings.warn(f"{directory / TRACKER} could not be written: {error.strerror}; {final.name} is complete", stacklevel=2)
    return final


def prune(directory: Path, keep: int | None, just_saved: int, abandoned: Collection[int] = ()) -> None:
    """Removes all but the `keep` checkpoints saved last (0 or None: none is removed) and the one just replaced.

    `abandoned` iterations, which this run did not go on from, go before all others. One whose manifest is damaged stays: it may
    be newer.
    """
    replaced = directory / (folder_name(just_saved) + REPLACED)
    if replaced.exists():
        discard(replaced)
    if keep:
        readable = {step: path for step, path in complete_checkpoints(directory).items() if _save_number(path) < float("inf")}
        for step in sorted(readable, key=lambda step: step not in abandoned)[:-keep]:
            discard(readable[step])


def discard(folder: Path) -> None:
    """Removes a complete folder; renamed first, lest a killed removal leaves half of it under a name that counts."""
    doomed = folder.with_name(folder.name.removesuffix(REPLACED) + INCOMPLETE)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _next_save_number(directory: Path) -> int:
    numbers = [_save_number(path) for path in complete_checkpoints(directory).values()]
    return 1 + max((int(number) for number in numbers if number < float("inf")), default=0)


def record_file(path: Path) -> FileRecord:
    """Reads the whole file."""
    size, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return FileRecord(size, f"{crc:08x}")


def verify_file(path: Path, record: FileRecord) -> None:
    """Raises DamagedFile."""
    try:
        size = path.stat().st_size  # before reading: a wrong size needs no reading
        if size != record.bytes:
            raise DamagedFile(f"{path.name} has {size} bytes where {record.bytes} were written")
        crc32 = record_file(path).crc32
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({describe_error(error)})") from error
    if crc32 != record.crc32:
        raise DamagedFile(f"{path.name} is damaged: its crc32 is {crc32} where {record.crc32} was written")


def write_durably(path: Path, text: str) -> None:
    """Replaces the file's contents in one step: at any moment it holds the old text or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes renames in the directory outlast a power failure, where the file system offers that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
