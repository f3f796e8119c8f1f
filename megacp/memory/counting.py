"""Counts the bytes of tensors without a GPU as the GPU's allocator would: live now, and the most since the last reset.

    with AllocationCounter() as counter:
        x = torch.empty(1024)               # counter.live_bytes() == 4096
        y = x[:10]                          # a view: still 4096
        del x, y                            # 0 again
    counter.peak_bytes()                    # 4096
    counter.peak_holders()                  # {"file.py:2": 4096}: the line of each allocation alive at the peak

So a memory claim about a GPU can be proved where there is none. Counted are the storages that operators make while the counter is
on, forward and backward alike, until the last tensor on them dies, at their present size: FSDP shrinks a storage to nothing
and lets it grow again. Not counted are tensors that were there before, such as a pool that stands for host memory, what a
kernel allocates and frees inside itself, and the fake tensors with which DTensor works out shapes.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacp.memory.allocation_sites import line_of


class AllocationCounter(TorchDispatchMode):
    """A context manager; sees what runs in its thread, which without a GPU includes autograd's backward.

    `device_type` "meta" counts tensors that have shapes and no memory: a layer at its true size, in a moment. `name` says of the
    frame in which something is allocated what it is.
    """

    def __init__(self, device_type: str = "cpu", name: Callable[[FrameType], str] = line_of):
        super().__init__()
        self._device_type, self._name = device_type, name
        self._storages: dict[int, tuple[weakref.ref, int, str]] = {}  # by address: (the storage, bytes, name)
        self._foreign: dict[int, weakref.ref] = {}  # from before
        self._live = self._peak = 0
        self._notes_peaks = True
        self._holders_at_peak: list[tuple[str, int]] = []

    def live_bytes(self) -> int:
        return self._live

    def peak_bytes(self) -> int:
        """The most that was alive at once since `reset_peak`, or since the start."""
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0
        self._note_peak()

    def note_peaks(self, noted: bool) -> None:
        """False: what is alive from here on is no peak; True: it is again."""
        self._notes_peaks = noted
        self._note_peak()

    def peak_holders(self) -> dict[str, int]:
        """Bytes alive at the peak by name, unless told otherwise the line that made them; the most first."""
        totals = Counter()
        for name, bytes_ in self._holders_at_peak:
            totals[name] += bytes_
        return dict(totals.most_common())

    def rename_live(self, name: str) -> None:
        """What is alive now is called `name` from here on."""
        self._storages = {key: (reference, bytes_, name) for key, (reference, bytes_, _) in self._storages.items()}

    def __enter__(self) -> "AllocationCounter":
        self._resize_ = torch.UntypedStorage.resize_  # no operator: FSDP calls it on the storage itself

        def resize_(storage, size):
            result = self._resize_(storage, size)
            self._update(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize_

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls us again for its local part
        given = [*self._storages_in(args), *self._storages_in((kwargs or {}).values())]
        for storage in given:
            if storage._cdata not in self._storages:
                self._remember_foreign(storage)
        result = function(*args, **(kwargs or {}))
        for storage in (*given, *self._storages_in((result,))):  # an operator may resize what it is given
            self._update(storage)
        return result

    def _storages_in(self, values: Iterable) -> Iterator[torch.UntypedStorage]:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.device.type == self._device_type and not isinstance(value, FakeTensor):
                    yield value.untyped_storage()
            elif isinstance(value, (list, tuple)):
                yield from self._storages_in(value)

    def _remember_foreign(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._foreign:
            self._foreign[key] = weakref.ref(storage, lambda _: self._foreign.pop(key, None))

    def _update(self, storage: torch.UntypedStorage) -> None:
        key, bytes_ = storage._cdata, storage.nbytes()
        if key in self._foreign:
            return
        if key not in self._storages:
            if not bytes_:
                return
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), 0, self._name(sys._getframe(1))
        reference, before, name = self._storages[key]
        if bytes_ != before:
            self._storages[key] = reference, bytes_, name
            self._live += bytes_ - before
            self._note_peak()

    def _forget(self, key: int) -> None:
        _, bytes_, _ = self._storages.pop(key)
        self._live -= bytes_

    def _note_peak(self) -> None:
        if self._notes_peaks and (self._live > self._peak or not self._peak):
            self._peak = self._live
            self._holders_at_peak = [(name, bytes_) for _, bytes_, name in self._storages.values()]
