"""Work beside the attention: on a GPU, a stream of its own for what comes before and after it.

    lane = Lane(stream)                       # Lane(None): everything on the current stream
    with lane:                                # on the stream, after what the current one was given so far
        q = pack()
        ready = lane.mark()
    lane.after(ready)                         # the current stream goes on after `pack`
    o = lane.lend(attention(q))               # made on the current stream, to be used on the other: kept from reuse until that is done
    lane.rejoin()                             # the current stream goes on after everything

Memory that is made in the lane and used on the current stream needs no such care as long as it is freed between two entries: each
entry waits for what the current stream was given before.
"""

import torch
from torch import Tensor


class Lane:
    """Entered again and again, not nested."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream, self._entered = stream, None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()

    def __exit__(self, *exception) -> None:
        if self._stream is not None:
            self._entered.__exit__(*exception)

    def mark(self) -> torch.cuda.Event | None:
        """The end of the lane's work so far."""
        return None if self._stream is None else self._stream.record_event()

    def after(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def lend(self, tensor: Tensor) -> Tensor:
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def rejoin(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
