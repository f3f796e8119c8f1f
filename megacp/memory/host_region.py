"""Room in pinned host memory, taken once for a whole run.

    pool = HostPool(bytes_=64 * GIB, pinned=True)        # pins 64 GiB, once: less than 0.1 s a GiB
    region = pool.take(shape_bytes)                       # room for one tensor of one layer
    region.write(key, offset, tile, copies)               # device → host
    region.read(key, offset, buffer, copies).wait()       # host → device, after the write of the same key

Pinning on the way, copy by copy, would stop the device each time. A key names a block: the same offset and size at each use.
"""

import contextlib
import mmap
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from megacp.memory.copies import Copies, Event

ALIGNMENT = 4096  # bytes, between tensors: a page, as direct I/O to a disk wants


class Pending:
    """A copy on its way. `wait()` makes the current stream wait for it; returns the tensor it fills."""

    def __init__(self, tensor: Tensor, wait: Callable[[], None] | None = None):
        self._tensor, self._wait = tensor, wait

    def wait(self) -> Tensor:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._tensor


class HostPool:
    """One allocation, handed out from the front. Raises ValueError naming --host-memory-gib when the host cannot give it."""

    def __init__(self, bytes_: int, pinned: bool, device: str = "cpu"):
        """`device` "meta": room that takes none, to predict with."""
        try:
            self._memory = _pinned(bytes_) if pinned and bytes_ else torch.empty(bytes_, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError, OSError) as error:  # torch's is a RuntimeError for a failed allocation and a failed pin
            raise ValueError(
                f"activations need {bytes_ / 2**30:.2f} GiB of {'pinned ' if pinned else ''}host memory on this rank, which the host "
                f"refused ({str(error).splitlines()[0]}); --activation-memory auto with a smaller --host-memory-gib, "
                "--activation-memory disk with --disk-offload-dir, --recompute-granularity full or more ranks in "
                "--context-parallel-size need less"
            ) from error
        self._taken = 0

    def take(self, bytes_: int) -> "HostRegion":
        return HostRegion(self.take_memory(bytes_))

    def take_memory(self, bytes_: int) -> Tensor:
        first = self._taken
        self._taken += padded(bytes_)
        return self._memory[first : first + bytes_]


def _pinned(bytes_: int) -> Tensor:
    # Shared memory, mmap's default, has no large pages on most systems: 0.25 to 0.35 s a GiB instead of 0.04 to 0.10, measured beside
    # an H200. A process that forks would share private pages with its child, and write to copies the GPU knows nothing of.
    pages = _PinnedPages(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without
                pages.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE].zero_()  # on several cores; the driver makes pages on one
    pages.pin(memory.data_ptr())
    return memory


class _PinnedPages(mmap.mmap):
    """Memory from the system itself, as large pages where it has them, which are pinned faster.

    PyTorch's allocator of pinned memory would round up to a power of two: 65 GiB would take 128.
    """

    address = 0

    def pin(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self.address = address

    def __del__(self):
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def padded(bytes_: int) -> int:
    """`bytes_` as a pool counts them."""
    return -(-bytes_ // ALIGNMENT) * ALIGNMENT


class HostRegion:
    """Room for one tensor. Blocks are ordered by events: a read after its write, a write after the last read."""

    def __init__(self, memory: Tensor):
        self._memory = memory
        self._written: dict[Hashable, Event | None] = {}
        self._read: dict[Hashable, Event | None] = {}

    def write(self, key: Hashable, offset: int, source: Tensor, copies: Copies) -> Pending:
        """Starts copying contiguous `source` to byte `offset`. The caller keeps `source` unchanged until he has waited."""
        event = copies.to_host(self._block(offset, source), source, self._read.get(key))
        self._written[key] = event
        return Pending(source, lambda: copies.wait(event))

    def read(self, key: Hashable, offset: int, destination: Tensor, copies: Copies) -> Pending:
        """Starts filling contiguous `destination` with the block last written under `key`."""
        event = copies.to_device(destination, self._block(offset, destination), self._written[key])
        self._read[key] = event
        return Pending(destination, lambda: copies.wait(event))

    def _block(self, offset: int, like: Tensor) -> Tensor:
        return self._memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
