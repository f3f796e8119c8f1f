"""Copies between the device and pinned host memory that run beside the computation.

    copies = Copies(torch.device("cuda"))
    done = copies.to_host(host, tile)         # returns at once; starts when what made `tile` is done
    copies.wait(done)                         # what is enqueued from here on comes after the copy: `tile` may be overwritten

One stream each way, so that the two directions overlap each other and the computation. Nothing here blocks the host, and no tensor
is handed to the allocator while a copy still uses it: who starts a copy keeps both ends until he has waited for its event.
On a CPU copies are plain, events are None.
"""

import torch
from torch import Tensor

Event = torch.cuda.Event


class Copies:
    """The copy streams of one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, destination: Tensor, source: Tensor, after: Event | None = None) -> Event | None:
        """Starts a copy device → host of what the current stream has made so far, and after `after`; returns its end."""
        return self._copy(self._outward if self.cuda else None, destination, source, after)

    def to_device(self, destination: Tensor, source: Tensor, after: Event | None = None) -> Event | None:
        """Starts a copy host → device once the current stream's work so far no longer needs `destination`, and after `after`."""
        return self._copy(self._inward if self.cuda else None, destination, source, after)

    def wait(self, event: Event | None) -> None:
        """The current stream goes on only after `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def now(self) -> Event | None:
        """The end of the current stream's work so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def _copy(self, stream, destination: Tensor, source: Tensor, after: Event | None) -> Event | None:
        if not self.cuda:
            destination.copy_(source)
            return None
        stream.wait_event(self.now())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            return stream.record_event()
