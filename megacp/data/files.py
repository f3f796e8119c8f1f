"""Files that survive a power cut, and what tells that one is as it was written.

    with open(folder / "plan.json", "wb") as file:
        file.write(data)
        flush_to_disk(file)                     # its contents are on the disk
    sync_folder(folder)                         # and its name
    file_sha256(folder / "plan.json")           # "9f86d08…", 64 hexadecimal digits
"""

import hashlib
import os


def flush_to_disk(file) -> None:
    """What was written survives a power cut."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike) -> None:
    """What was created and renamed there survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: str | os.PathLike) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
