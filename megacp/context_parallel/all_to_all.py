"""The all-to-all that turns tokens-on-every-rank into heads-on-every-rank and back, without a transpose.

Contiguous shards make it free of copies: rank `c` holds tokens `[c·T, (c+1)·T)`, so what a rank receives as `[C, T, heads, D]`
(one block a sender) *is* `[S, heads, D]` in memory, and what it sends back as `[S, heads, D]` is `[C, T, heads, D]`, one block
a receiver.

Worked example, 2 ranks, T = 3, one head each, D = 1; the letter is the head, the digit the token:

    rank 0 sends  [[a0 a1 a2], [b0 b1 b2]]      receives [[a0 a1 a2], [a3 a4 a5]] = head a of all 6 tokens
    rank 1 sends  [[a3 a4 a5], [b3 b4 b5]]      receives [[b0 b1 b2], [b3 b4 b5]] = head b of all 6 tokens
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Loopback:
    """Stands in for a group of `ranks`, in one process: what is sent comes back, through memory of its own.

    The memory of an exchange without the others; for predictions. The values are those of no layout.
    """

    ranks: int

    def size(self) -> int:
        return self.ranks

    def exchange(self, send_C: torch.Tensor) -> "Exchange":
        """Done when it returns; a stand-in that takes its time overrides this."""
        return Exchange(send_C, send_C.clone())


class Exchange:
    """An all-to-all on its way. `wait()` returns what arrives; what is sent must not change before."""

    def __init__(self, send_C: torch.Tensor, received_C: torch.Tensor, work: dist.Work | None = None):
        self._send_C, self._received_C, self._work = send_C, received_C, work

    def wait(self) -> torch.Tensor:
        """On a GPU the current stream waits, not the host. Lets go of what was sent."""
        if self._work is not None:
            self._work.wait()
        self._send_C = self._work = None
        return self._received_C


def all_to_all(send_C: torch.Tensor, group: dist.ProcessGroup | Loopback | None) -> Exchange:
    """Begins to exchange block `r` of `send_C` with rank `r` of `group`; what arrives has the same shape, block `r` from rank `r`.

    It runs beside what is computed until `wait()`; exchanges follow each other in the order in which they were begun. `send_C` is
    contiguous, its first dimension the group's size. With one rank (or `group` None) nothing travels and the input itself
    comes back. Raises ValueError for another shape.
    """
    size = 1 if group is None else group.size()
    if send_C.shape[0] != size or not send_C.is_contiguous():
        raise ValueError(f"all_to_all over {size} ranks takes a contiguous [{size}, ...], not {tuple(send_C.shape)}")
    if size == 1:
        return Exchange(send_C, send_C)
    if isinstance(group, Loopback):
        return group.exchange(send_C)
    received_C = torch.empty_like(send_C)
    return Exchange(send_C, received_C, dist.all_to_all_single(received_C, send_C, group=group, async_op=True))
