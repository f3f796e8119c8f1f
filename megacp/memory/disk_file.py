"""One rank's file of activations on disk: all its room taken at once, gone with the process however that ends.

    file = DiskFile("/nvme", 512 * GIB)        # ValueError naming --disk-offload-dir when the room is not there
    file.write(1 << 20, memoryview(data))      # whole, or DiskError
    file.read(1 << 20, memoryview(buffer))

The name is removed as soon as the file is open: the room returns to the disk when the process ends, by `kill -9` too, and nothing
has to be swept up. Transfers in whole pages bypass the page cache (O_DIRECT) where the file system can, so that terabytes of
activations do not push everything else out of host memory; others go through it.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

from megacp.memory.units import GIB

PAGE = 4096  # bytes: what direct I/O wants positions, lengths and addresses to be multiples of


class DiskError(RuntimeError):
    """A transfer to or from --disk-offload-dir failed, or what was read is not what was written."""


class DiskFile:
    """Safe to use from several threads at once on different bytes."""

    def __init__(self, directory: str, bytes_: int):
        self._directory = directory
        try:
            self._buffered, self.path = tempfile.mkstemp(prefix="megacp-activations-", dir=directory)
            weakref.finalize(self, os.close, self._buffered)
            try:
                self._direct = _open_direct(self.path)
            finally:
                os.unlink(self.path)
            if self._direct is not None:
                weakref.finalize(self, os.close, self._direct)
                if not _answers(self._direct):
                    self._direct = None
        except OSError as error:
            raise ValueError(
                f"--disk-offload-dir {directory}: no file can be made there ({error.strerror}); an existing directory on a local "
                "file system that this user may write to works"
            ) from error
        try:
            os.posix_fallocate(self._buffered, 0, bytes_)
        except OSError as error:
            os.ftruncate(self._buffered, 0)
            status = os.statvfs(directory)
            raise ValueError(
                f"--disk-offload-dir {directory} cannot hold this rank's activations: {bytes_:,} bytes ({bytes_ / GIB:.2f} GiB) "
                f"needed, {status.f_bavail * status.f_frsize:,} free ({error.strerror}); a directory with more room, "
                "--recompute-granularity full, --activation-memory host or more ranks in --context-parallel-size work"
            ) from error

    @property
    def bypasses_page_cache(self) -> bool:
        return self._direct is not None

    def write(self, position: int, data: memoryview) -> None:
        """Writes all of `data`, which begins at a page of memory. Raises DiskError."""
        self._transfer("writing", lambda fd, part, at: os.pwrite(fd, part, at), position, data)

    def read(self, position: int, into: memoryview) -> None:
        """Fills all of `into`, which begins at a page of memory. Raises DiskError."""
        self._transfer("reading", lambda fd, part, at: os.preadv(fd, [part], at), position, into)

    def error(self, doing: str, position: int, length: int, reason: str) -> DiskError:
        """The error to raise for what went wrong with bytes `[position, position + length)`."""
        return DiskError(
            f"--disk-offload-dir {self._directory}: {doing} bytes {position:,} to {position + length:,} of {self.path} failed: "
            f"{reason}. Another directory, or --activation-memory host, works when that disk does not"
        )

    def _transfer(self, doing: str, move: Callable[[int, memoryview, int], int], position: int, memory: memoryview) -> None:
        whole_pages = position % PAGE == 0 and len(memory) % PAGE == 0
        fd = self._direct if self._direct is not None and whole_pages else self._buffered
        done = 0
        while done < len(memory):
            try:
                moved = move(fd, memory[done:], position + done)
            except OSError as error:
                raise self.error(doing, position, len(memory), str(error)) from error
            if moved == 0:
                raise self.error(doing, position, len(memory), f"the file ends after {done:,} of them")
            done += moved
            fd = self._buffered  # the rest of a short transfer may begin inside a page


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has no direct I/O
            return None
        raise


def _answers(direct: int) -> bool:
    """Whether direct I/O in pages works; some file systems open a file for it and then refuse."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            return os.pwrite(direct, page, 0) == PAGE and os.preadv(direct, [page], 0) == PAGE
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
