"""Room on disk, with the interface of `HostRegion`, taken once for a whole run.

    pool = DiskPool("/nvme", 512 * GIB, staging, chunk=2 << 20, device=device)
    region = pool.take(shape_bytes)                       # room for one tensor of one layer
    region.write(key, offset, tile, copies)               # device → staging → disk, all in the background
    region.read(key, offset, buffer, copies).wait()       # disk → staging → device, after the write of the same key

A block travels in chunks, each through a slot of (pinned) staging memory, on threads of the pool: the training thread only starts
transfers, and waits in `wait()` when data is not there yet. A write may be waited for once its bytes are in staging; a read, once
its copy to the device is on its way, so slots not yet emptied by the device are the depth of the read-ahead. A chunk's CRC-32 is
taken from staging before it is written and compared after it is read.

Nothing here can wait in a circle. A transfer waits only for ones started before it (the last of the same chunk), for a slot, and for
device work enqueued before it was started; it takes its slot last, and then needs nothing but disk and device. Reads and writes have
threads of their own, and each sort starts in order.

What fails in a thread is raised on the training thread, by the next `write`, `read` or `wait` of any region of the pool.
"""

import zlib
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import Tensor

from megacp.memory.copies import Copies, Event
from megacp.memory.disk_file import PAGE, DiskFile
from megacp.memory.host_region import Pending, padded

THREADS = 4  # each way: keeps an NVMe's queue filled; each also takes checksums, at some GB/s a core


class DiskPool:
    """One file, handed out from the front; `staging` is host memory (pinned for a GPU) for one chunk and a page at least.

    Raises ValueError naming --disk-offload-dir when the disk cannot give `bytes_`.
    """

    def __init__(self, directory: str, bytes_: int, staging: Tensor, chunk: int, device: torch.device):
        self.file, self.chunk = DiskFile(directory, bytes_), chunk
        self._taken = 0
        self._slots = _Slots(staging, chunk)
        self._failure: BaseException | None = None
        cuda = device.type == "cuda"
        self._outward, self._inward = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else (None, None)

        def executor(name: str) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(THREADS, f"disk-{name}", (lambda: torch.cuda.set_device(device)) if cuda else None)

        self._writers, self._readers = executor("write"), executor("read")

    def take(self, bytes_: int) -> "DiskRegion":
        first = self._taken
        self._taken += padded(bytes_)
        return DiskRegion(self, first)

    def check(self) -> None:
        """Raises what failed in the background, if anything did."""
        if self._failure is not None:
            raise self._failure

    def start_write(self, chunk: "_Chunk", source: Tensor, after: Event | None) -> Future:
        """Returns the future of the event at which `source` (bytes) is in staging."""
        staged: Future = Future()
        # A list, which the thread empties: it must not keep the device's memory longer than the caller does.
        chunk.last = self._writers.submit(self._write, chunk, [source], after, chunk.last, staged)
        return staged

    def start_read(self, chunk: "_Chunk", destination: Tensor, after: Event | None) -> Future:
        """Returns the future of the event at which `destination` (bytes) is filled."""
        arriving: Future = Future()
        chunk.last = self._readers.submit(self._read, chunk, [destination], after, chunk.last, arriving)
        return arriving

    def _write(self, chunk: "_Chunk", source: list[Tensor], after: Event | None, last: Future | None, staged: Future) -> None:
        with self._reporting(staged):
            if last is not None:
                last.result()
            with self._slots.one() as slot:
                event = _copy(self._outward, slot.memory[: chunk.length], source.pop(), after)
                staged.set_result(event)
                if event is not None:
                    event.synchronize()
                data = slot.view[: chunk.length]
                chunk.checksum = zlib.crc32(data)
                self.file.write(chunk.position, data)

    def _read(self, chunk: "_Chunk", destination: list[Tensor], after: Event | None, last: Future, arriving: Future) -> None:
        with self._reporting(arriving):
            last.result()
            with self._slots.one() as slot:
                data = slot.view[: chunk.length]
                self.file.read(chunk.position, data)
                checksum = zlib.crc32(data)
                if checksum != chunk.checksum:
                    reason = (
                        f"their CRC-32 is {checksum:08x}, {chunk.checksum:08x} was written: the file was changed or the disk is bad"
                    )
                    raise self.file.error("reading back", chunk.position, chunk.length, reason)
                slot.busy = _copy(self._inward, destination.pop(), slot.memory[: chunk.length], after)
                arriving.set_result(slot.busy)

    @contextmanager
    def _reporting(self, future: Future) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            if not future.done():
                future.set_exception(self._failure)
            raise


class DiskRegion:
    """Room for one tensor. Blocks are ordered by futures: a read after its write, a write after the last read."""

    def __init__(self, pool: DiskPool, first: int):
        self._pool, self._first = pool, first
        self._blocks: dict[Hashable, list[_Chunk]] = {}

    def write(self, key: Hashable, offset: int, source: Tensor, copies: Copies) -> Pending:
        """Starts copying contiguous `source` to byte `offset`. The caller keeps `source` unchanged until he has waited."""
        if key not in self._blocks:
            size, first = self._pool.chunk, self._first + offset
            self._blocks[key] = [_Chunk(first + a, min(size, source.nbytes - a)) for a in range(0, source.nbytes, size)]
        return self._start(self._pool.start_write, key, source, copies)

    def read(self, key: Hashable, offset: int, destination: Tensor, copies: Copies) -> Pending:
        """Starts filling contiguous `destination` with the block last written under `key`."""
        return self._start(self._pool.start_read, key, destination, copies)

    def _start(self, start, key: Hashable, tensor: Tensor, copies: Copies) -> Pending:
        self._pool.check()
        after = copies.now()
        chunks = self._blocks[key]
        parts = tensor.view(-1).view(torch.uint8).split(self._pool.chunk)
        futures = [start(chunk, part, after) for chunk, part in zip(chunks, parts, strict=True)]

        def wait() -> None:
            for future in futures:
                copies.wait(future.result())
            self._pool.check()

        return Pending(tensor, wait)


class _Chunk:
    """Bytes `[position, position + length)` of the file; `last`: the transfer of them that was started last."""

    def __init__(self, position: int, length: int):
        self.position, self.length = position, length
        self.checksum: int | None = None
        self.last: Future | None = None


class _Slot:
    """Staging memory of one chunk; until `busy` the device reads it."""

    def __init__(self, memory: Tensor):
        self.memory, self.view = memory, memoryview(memory.numpy())
        self.busy: Event | None = None


class _Slots:
    """As many as fit in `staging`, each beginning at a page, as direct I/O wants."""

    def __init__(self, staging: Tensor, chunk: int):
        first, size = -staging.data_ptr() % PAGE, padded(chunk)
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for start in range(first, len(staging) - size + 1, size):
            self._free.put(_Slot(staging[start : start + size]))
        if self._free.empty():
            raise ValueError(f"{len(staging):,} bytes of staging memory hold no chunk of {size:,} that begins at a page")

    @contextmanager
    def one(self) -> Iterator[_Slot]:
        """The slot that has been free longest, for the time of the block."""
        slot = self._free.get()
        try:
            if slot.busy is not None:
                slot.busy.synchronize()
                slot.busy = None
            yield slot
        finally:
            self._free.put(slot)


def _copy(stream, destination: Tensor, source: Tensor, after: Event | None) -> Event | None:
    """Copies after `after`, on `stream` if there is one; returns the copy's end, at which a thread can wait without spinning."""
    if stream is None:
        destination.copy_(source)
        return None
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        destination.copy_(source, non_blocking=True)
        end = torch.cuda.Event(blocking=True)
        end.record(stream)
        return end
