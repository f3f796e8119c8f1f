"""Where the documents of a packed stream begin and end.

Worked example: a stream of S = 8 tokens holds documents of 3, 1 and 4 tokens.

    documents = Documents((0, 3, 4, 8))
    documents.total, documents.max_seqlen, documents.sum_squares      # 8, 4, 26
    list(documents.spans())                                           # [(0, 3), (3, 4), (4, 8)]

Attention is causal inside each document and nothing crosses a border: token 3 sees itself alone, token 6 sees 4, 5 and 6.
Causal attention costs about sum_squares / 2 query-key pairs, which is what FLOP counts use. Borders are Python integers on
the host, so no kernel launch has to wait for a copy from the device.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

INT32_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class Documents:
    """Borders of the documents of one stream: 0 first, strictly increasing, the length of the stream last."""

    cu_seqlens: tuple[int, ...]
    _device_copies: dict[tuple[torch.device, int], Tensor] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False)
    _rows: dict[tuple[int, int], tuple] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)
    _runs: dict[tuple[int, int, int], list] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        borders = self.cu_seqlens
        if len(borders) < 2 or borders[0] != 0 or any(a >= b for a, b in zip(borders, borders[1:])):
            shown = f"{borders[:8]}{'...' if len(borders) > 8 else ''}"
            raise ValueError(f"cu_seqlens {shown} must start at 0 and increase strictly up to the length of the stream, such as"
                             " (0, 3, 8)")

    @property
    def total(self) -> int:
        """Tokens of the stream, S."""
        return self.cu_seqlens[-1]

    @functools.cached_property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for start, stop in self.spans())

    @functools.cached_property
    def sum_squares(self) -> int:
        """Sum of the squared lengths, an exact integer however long the stream."""
        return sum((stop - start) ** 2 for start, stop in self.spans())

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each document, in order."""
        return zip(self.cu_seqlens, self.cu_seqlens[1:])

    def device_cu_seqlens(self, device: torch.device | str, queries: int | None = None) -> Tensor:
        """The borders as an int32 tensor on `device`, copied there once; of the last `queries` tokens when given.

        Documents((0, 3, 4, 8)) has (0, 3, 4, 8), and for its last 6 tokens (0, 1, 2, 6).
        """
        if self.total >= INT32_LIMIT:
            raise ValueError(f"a stream of {self.total} tokens does not fit the kernels' int32 borders; below {INT32_LIMIT} does")
        device, before = torch.device(device), 0 if queries is None else self.total - queries
        if (device, before) not in self._device_copies:
            borders = [max(border - before, 0) for border in self.cu_seqlens]
            self._device_copies[device, before] = torch.tensor(borders, dtype=torch.int32, device=device)
        return self._device_copies[device, before]

    def kernel_borders(self, q_SHD: Tensor) -> dict[str, Tensor | int]:
        """Of the queries, which may be the last tokens of the stream only, and of the keys: a query sees the keys up to its own."""
        queries, keys = self.device_cu_seqlens(q_SHD.device, len(q_SHD)), self.device_cu_seqlens(q_SHD.device)
        longest = self.max_seqlen
        return dict(cu_seqlens_q=queries, cu_seqlens_k=keys, max_seqlen_q=min(longest, len(q_SHD)), max_seqlen_k=longest)

    def of_rows(self, start: int, stop: int) -> tuple[int, "Documents"]:
        """What the queries `[start, stop)` can see: the first key, and the borders from there to `stop`.

        Documents((0, 3, 4, 8)).of_rows(5, 7) is (4, Documents((0, 3))): tokens 5 and 6 see keys from 4 on. Found once per
        range, so that every stage and layer shares the result and its copy on the device.
        """
        if (start, stop) == (0, self.total):
            return 0, self
        if (start, stop) not in self._rows:
            self._rows[start, stop] = self._find_rows(start, stop)
        return self._rows[start, stop]

    def _find_rows(self, start: int, stop: int) -> tuple[int, "Documents"]:
        first = bisect.bisect_right(self.cu_seqlens, start) - 1
        last = bisect.bisect_left(self.cu_seqlens, stop)
        origin = self.cu_seqlens[first]
        return origin, Documents((*(border - origin for border in self.cu_seqlens[first:last]), stop - origin))

    def runs(self, limit: int, padding: int, most: int) -> list["DocumentRun"]:
        """Whole documents gathered, in order, into runs of at most `limit` tokens, counting `padding` more per document.

        A run has at most `most` documents; one that is too long by itself makes a run by itself. Found once per limit, as rows
        are. Documents((0, 3, 4, 8)).runs(limit=6, padding=1, most=9) gives the tokens [0, 4) with documents (0, 3, 4), then
        [4, 8) with (0, 4).
        """
        if (limit, padding, most) not in self._runs:
            self._runs[limit, padding, most] = self._find_runs(limit, padding, most)
        return self._runs[limit, padding, most]

    def _find_runs(self, limit: int, padding: int, most: int) -> list["DocumentRun"]:
        runs, first = [], 0
        for index in range(1, len(self.cu_seqlens)):
            full = index == len(self.cu_seqlens) - 1 or index - first == most
            if full or self.cu_seqlens[index + 1] - self.cu_seqlens[first] + padding * (index + 1 - first) > limit:
                start = self.cu_seqlens[first]
                inner = Documents(tuple(border - start for border in self.cu_seqlens[first:index + 1]))
                runs.append(DocumentRun(start, self.cu_seqlens[index], inner))
                first = index
        return runs


@dataclasses.dataclass(frozen=True)
class DocumentRun:
    """A run of whole documents: tokens [start, stop) of the stream, and their borders counted from `start`."""

    start: int
    stop: int
    documents: Documents
