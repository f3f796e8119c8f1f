"""What stands in for the Ulysses group: each exchange a copy within the device, beside what is computed as NCCL's are.

    AttentionSettings(schedule, stand_in(8, device), ...)

On a GPU the copies run on a stream of their own, so that it shows whether the schedule hides exchanges. A copy within the device is
faster than any link between devices, and has no other rank to wait for.
"""

import torch

from megacp.context_parallel.all_to_all import Exchange, Loopback


def stand_in(ranks: int, device: torch.device) -> Loopback | None:
    """For a group of `ranks`; None for one rank, which exchanges nothing."""
    if ranks == 1:
        return None
    return StreamLoopback(ranks, device) if device.type == "cuda" else Loopback(ranks)


class StreamLoopback(Loopback):
    """A `Loopback` on a GPU whose exchanges are under way until they are waited for."""

    def __init__(self, ranks: int, device: torch.device):
        super().__init__(ranks)
        object.__setattr__(self, "_stream", torch.cuda.Stream(device))  # the base class is frozen

    def exchange(self, send_C: torch.Tensor) -> Exchange:
        received_C = torch.empty_like(send_C)  # on the computing stream, as a collective's output; kept until `wait`
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            received_C.copy_(send_C)
            done = torch.cuda.Event()
            done.record()
        return Exchange(send_C, received_C, _Copy(done))


class _Copy:
    """The part of `torch.distributed.Work` that an `Exchange` uses."""

    def __init__(self, done: torch.cuda.Event):
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
