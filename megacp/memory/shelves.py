"""Kept tensors as the layer uses them: rows in tiles, and attention outputs by stage; on the device, or elsewhere and streamed.

    rows = DeviceRows(h_Td)                               rows = RegionRows(region, h_Td, tile_size, copies)
    rows.put(0, 8192, h_Td[0:8192])                       # keep it (device: nothing to do)
    for (start, stop), (h_td,) in read_ahead(tiles, lambda tile: [rows.fetch(*tile)]):
        ...                                               # h_td is there; the next tile is on its way meanwhile

Both kinds answer alike, so the layer is written once. What is fetched is a view of the device's own tensor, or one of two staging
buffers in turn: it is good until the next but one fetch.

Letters: T tokens of the rank, t of a tile, C ranks of the Ulysses group, n query heads of a stage for one rank, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from megacp.memory.copies import Copies
from megacp.memory.host_region import Pending

Step = TypeVar("Step")
Tiles = list[tuple[int, int]]


def read_ahead(steps: Iterable[Step], fetch: Callable[[Step], list[Pending]]) -> Iterator[tuple[Step, list[Tensor]]]:
    """Yields each step with what it fetched, having started the fetch of the next one."""
    waiting = None
    for step in steps:
        fetched = fetch(step)
        if waiting is not None:
            yield waiting[0], [pending.wait() for pending in waiting[1]]
        waiting = step, fetched
    if waiting is not None:
        yield waiting[0], [pending.wait() for pending in waiting[1]]


class DeviceRows:
    """A tensor on the device, read by rows."""

    def __init__(self, rows: Tensor):
        self._rows = rows

    def fetch(self, start: int, stop: int) -> Pending:
        return Pending(self._rows[start:stop])

    def rest(self) -> None:
        """Nothing is held but the rows."""


class RegionRows:
    """Rows in a region, each tile a block; reads go through two staging buffers of `tile_size` rows."""

    def __init__(self, region, like: Tensor, tile_size: int, copies: Copies):
        self._region, self._copies = region, copies
        shape, kind = (min(tile_size, len(like)), *like.shape[1:]), dict(dtype=like.dtype, device=like.device)
        self._staging = _Staging(lambda: torch.empty(shape, **kind))  # without `like`, whose memory would live on in it
        self._row_bytes = like[:1].nbytes

    def put(self, start: int, stop: int, source: Tensor) -> Pending:
        """Starts keeping rows `[start, stop)`; `source` may change once the result was waited for."""
        return self._region.write(start, start * self._row_bytes, source, self._copies)

    def fetch(self, start: int, stop: int) -> Pending:
        buffer = self._staging.next()[: stop - start]
        return self._region.read(start, start * self._row_bytes, buffer, self._copies)

    def rest(self) -> None:
        """Gives up the staging buffers, once what was fetched is used by work already enqueued."""
        self._staging.clear()


class DeviceStages:
    """Attention outputs on the device: one `[C, T, n, D]` a stage, shaped as `like_CTnD` (on the meta device)."""

    def __init__(self, num_stages: int, like_CTnD: Tensor, device: torch.device):
        self._stages: list[Tensor | None] = [None] * num_stages
        self._like_CTnD, self._device = like_CTnD, device

    def put(self, stage: int, start: int, stop: int, x_CtnD: Tensor) -> None:
        """Keeps tokens `[start, stop)` of a stage: the tensor itself if it is the whole, else a copy."""
        if x_CtnD.shape == self._like_CTnD.shape:
            self._stages[stage] = x_CtnD
            return
        if self._stages[stage] is None:
            self._stages[stage] = torch.empty_like(self._like_CTnD, device=self._device)
        self._stages[stage][:, start:stop] = x_CtnD

    def fetch(self, stage: int, start: int, stop: int) -> Pending:
        return Pending(self._stages[stage][:, start:stop])

    fetch_tile = fetch

    def release(self, stage: int) -> None:
        self._stages[stage] = None

    def flush(self) -> None:
        """Nothing is on its way."""

    def rest(self) -> None:
        """Nothing is held but the stages."""


class RegionStages:
    """The same in a region. A block is one rank's part of one tile of one stage, `[t, n, D]`, contiguous everywhere."""

    def __init__(self, region, num_stages: int, like_CTnD: Tensor, tiles: Tiles, copies: Copies):
        self._region, self._copies, self._tiles = region, copies, tiles
        self._stage_bytes, self._rank_bytes, self._token_bytes = (x.nbytes for x in (like_CTnD, like_CTnD[0], like_CTnD[0, 0]))
        widest = max(stop - start for start, stop in tiles)
        self._dtype, self._tile_shape = like_CTnD.dtype, (like_CTnD.shape[0], widest, *like_CTnD.shape[2:])

        def staging() -> _Staging:
            return _Staging(lambda: torch.empty(self._tile_shape, dtype=self._dtype, device=copies.device))

        self._staging = [staging() for _ in range(num_stages)]
        self._leaving: list[Pending] = []  # copies of what was put last that may still run

    def put(self, stage: int, start: int, stop: int, x_CtnD: Tensor) -> None:
        """Starts keeping tokens `[start, stop)`, whole tiles. What was put before is waited for: one at a time is on its way out."""
        self.flush()
        for a, b in self._tiles_of(start, stop):
            self._leaving += self._write(stage, a, b, x_CtnD[:, a - start : b - start])

    def fetch(self, stage: int, start: int, stop: int) -> Pending:
        """Tokens `[start, stop)`, whole tiles, in memory of their own."""
        ranks, _, heads, head_dim = self._tile_shape
        x_CtnD = torch.empty(ranks, stop - start, heads, head_dim, dtype=self._dtype, device=self._copies.device)
        parts = [p for a, b in self._tiles_of(start, stop) for p in self._read(stage, a, b, x_CtnD[:, a - start : b - start])]
        return _all(parts, x_CtnD)

    def release(self, stage: int) -> None:
        """Nothing is on the device."""

    def fetch_tile(self, stage: int, start: int, stop: int) -> Pending:
        buffer_CtnD = _first_tokens(self._staging[stage].next(), stop - start)
        return _all(self._read(stage, start, stop, buffer_CtnD), buffer_CtnD)

    def flush(self) -> None:
        """Everything put so far may be overwritten or freed by the current stream's coming work."""
        for part in self._leaving:
            part.wait()
        self._leaving = []

    def rest(self) -> None:
        """Gives up all device memory: staging buffers, and what was on its way out."""
        self.flush()
        for staging in self._staging:
            staging.clear()

    def _tiles_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return ((a, b) for a, b in self._tiles if start <= a and b <= stop)

    def _write(self, stage: int, start: int, stop: int, x_CtnD: Tensor) -> list[Pending]:
        return [
            self._region.write((stage, rank, start), self._offset(stage, rank, start), x_tnD, self._copies)
            for rank, x_tnD in enumerate(x_CtnD)
        ]

    def _read(self, stage: int, start: int, stop: int, out_CtnD: Tensor) -> list[Pending]:
        return [
            self._region.read((stage, rank, start), self._offset(stage, rank, start), out_tnD, self._copies)
            for rank, out_tnD in enumerate(out_CtnD)
        ]

    def _offset(self, stage: int, rank: int, start: int) -> int:
        return stage * self._stage_bytes + rank * self._rank_bytes + start * self._token_bytes


RowShelf = DeviceRows | RegionRows
StageShelf = DeviceStages | RegionStages


class DeviceBlocks:
    """Whole tensors by number, such as a stage's log-sum-exp, on the device."""

    def __init__(self):
        self._blocks: dict[int, Tensor] = {}

    def put(self, number: int, block: Tensor) -> None:
        self._blocks[number] = block

    def fetch(self, number: int) -> Pending:
        """The block, for the last time."""
        return Pending(self._blocks.pop(number))

    def rest(self) -> None:
        """Nothing is held but the blocks."""


class RegionBlocks:
    """The same in a region; all blocks have the shape of `new_block()`."""

    def __init__(self, region, new_block: Callable[[], Tensor], copies: Copies):
        self._region, self._new_block, self._copies = region, new_block, copies
        self._leaving: Pending | None = None

    def put(self, number: int, block: Tensor) -> None:
        if self._leaving is not None:
            self._leaving.wait()
        self._leaving = self._region.write(number, number * block.nbytes, block, self._copies)

    def rest(self) -> None:
        """Gives up the block that was on its way out."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def fetch(self, number: int) -> Pending:
        block = self._new_block()
        return self._region.read(number, number * block.nbytes, block, self._copies)


class _Staging:
    """Two buffers in turn, made at the first use."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make, self._buffers, self._turn = make, [], 0

    def clear(self) -> None:
        self._buffers, self._turn = [], 0

    def next(self) -> Tensor:
        if len(self._buffers) < 2:
            self._buffers.append(self._make())
            return self._buffers[-1]
        self._turn ^= 1
        return self._buffers[self._turn ^ 1]


def _first_tokens(buffer_CtnD: Tensor, tokens: int) -> Tensor:
    """A contiguous `[C, tokens, n, D]` at the front of a wider buffer."""
    ranks, _, heads, head_dim = buffer_CtnD.shape
    return buffer_CtnD.flatten()[: ranks * tokens * heads * head_dim].view(ranks, tokens, heads, head_dim)


def _all(parts: list[Pending], whole: Tensor) -> Pending:
    def wait():
        for part in parts:
            part.wait()

    return Pending(whole, wait)
