"""A layer's loops over tiles and query chunks with their ends alone: what lies between is the same again, and is counted as often.

    loops = Loops(tokens=131072, tile_size=1024, memory=memory, work=work)
    list(loops.tiles(0, 131072))            # tiles 0, 1, 2 and 125, 126, 127 of 128; work of the third counts 123 times

Nothing is smaller than in the job itself: buffers that span the tokens do, so a peak is found where it is, whichever of them makes
it. Only the same steps are not taken again and again. A loop holds the most from its third step on (two staging buffers, the next
tile on its way); a last tile that is shorter is taken as it is.

Of query chunks a later one sees more keys, so the last take most. Four are run, then the chunks between as a single one, whose
memory is not that of a chunk: until it is gone, peaks are not noted; then the last, as they are. Its GEMMs and copies are those of
its chunks; its messages and attention calls are counted chunk by chunk (`megacp.planning.work`).

    128 chunks of 1,024:   [0, 1024)  …  [3072, 4096)  [4096, 124928)  [124928, 125952)  …  [130048, 131072)

Where attention is cut into calls of single heads, as beyond 2^31 elements, chunks take less again: there too six chunks before and
four after are run, and those between as single ones (`switches`). A chunk need not take most where it sees most when documents
begin inside it: such chunks are all run. And where the steps of a loop leave memory behind, `NotPeriodic` says so.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megacp.context_parallel.engine import AttentionSettings, QueryChunk
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.kernels.attention import Documents
from megacp.kernels.attention.calls import OFFSET_LIMIT, PADDING
from megacp.memory.counting import AllocationCounter
from megacp.memory.store import Geometry
from megacp.model import output_head
from megacp.model.layer_context import LayerContext
from megacp.planning.work import WorkCounter

ENDS = 3  # tiles at each end of a loop
FIRST_CHUNKS, LAST_CHUNKS = 4, 6
GONE_AFTER = 4  # chunks after the joint one: the next is begun ahead, its output returns one later and is copied out under another


class NotPeriodic(Exception):
    """A step leaves something behind, so that the next is not the same: all must be run."""


class Loops:
    """The tiles and chunks of one rank that are run; tells `work` how many each stands for and `memory` when peaks are none."""

    def __init__(
        self, tokens: int, tile_size: int, memory: AllocationCounter, work: WorkCounter,
        query_chunk: int | None = None, switches: list[int] | None = (),
    ):  # fmt: skip
        """`switches` of the job: between them and the ends chunks are run as one; None: all chunks are run."""
        self._tile_size, self._memory, self._work = tile_size, memory, work
        self._chunk = query_chunk or tokens
        self._chunks = _chunks(tokens, self._chunk, switches)
        spans = [(0, tokens), *self._chunks]
        # Every loop takes the same tiles: what one puts on a shelf another fetches.
        self._starts = sorted({start for span in spans for start in _ends(*span, tile_size)})

    def tiles(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of tiles of tokens `[first, last)`: all, or a chunk. A step's work counts for those left out next."""
        starts = [start for start in self._starts if first <= start < last]
        try:
            for start, following in itertools.pairwise([*starts, starts[-1] + self._tile_size]):
                before, self._work.times = self._memory.live_bytes(), (following - start) // self._tile_size
                yield start, min(start + self._tile_size, last)
                left = self._memory.live_bytes() - before
                if left and self._work.times > 1:
                    raise NotPeriodic(f"each tile of {self._tile_size} tokens leaves {left} bytes")
        finally:
            self._work.times = 1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of the chunks of a stage."""
        since, live, growth = None, 0, 0
        for start, stop in self._chunks:
            before, live = live, self._memory.live_bytes()
            if stop - start > self._chunk:
                since, growth, expected = 0, live - before, live - start // self._chunk * (live - before)
                self._work.joint_chunk = stop - start, self._chunk
                self._memory.note_peaks(False)
            elif since is not None:
                since += 1
                if since == GONE_AFTER:
                    expected += start // self._chunk * growth
                    if growth < 0 or live != expected:
                        more = live - expected
                        raise NotPeriodic(f"chunks of {self._chunk} tokens leave {growth} bytes each, then {more} more")
                    self._memory.note_peaks(True)
            yield start, stop


def switches(schedule: HeadSchedule, head_dim: int, documents: Documents, size: int) -> list[int] | None:
    """Chunks of `size` tokens that are the first whose attention is cut, where it was whole before; those between grow.

    A chunk's queries are of each rank's tokens, and see all before them: some rank's are the first with too many keys for a call of
    all heads. None: chunks do not grow, as not all look back to one beginning.
    """
    if len(documents) > 1:
        return None
    tokens = documents.total // schedule.ulysses_degree
    found = set()
    for stage in schedule.stages:
        brought = (schedule.stages[heads.arrival].num_new_kv for heads in stage.runs)
        keys = (OFFSET_LIMIT - 1) // (max(stage.num_queries, *brought) * head_dim) - PADDING  # the most of a call of all heads
        if 0 <= keys < documents.total:
            found.add(keys % tokens // size)
    return sorted(found)


def _chunks(tokens: int, size: int, switches: list[int] | None) -> list[tuple[int, int]]:
    borders = [*range(0, tokens, size), tokens]
    last = len(borders) - 1
    if switches is not None:
        near = {*range(FIRST_CHUNKS + 1), *range(last - LAST_CHUNKS, last + 1)}
        near.update(*(range(first - LAST_CHUNKS, first + FIRST_CHUNKS + 1) for first in switches))
        borders = [borders[i] for i in sorted(near) if 0 <= i <= last]
    return list(zip(borders, borders[1:]))


def _ends(first: int, last: int, tile_size: int) -> list[int]:
    """Where the first and last tiles of `[first, last)` begin."""
    starts = range(first, last, tile_size)
    return [*starts[:ENDS], *starts[-ENDS:]]


@dataclass(frozen=True)
class FewChunks(AttentionSettings):
    """Settings of attention with the chunks of `loops`."""

    loops: Loops | None = None

    @property
    def chunks(self) -> Iterator[QueryChunk]:
        tokens = self.tokens_per_rank
        return (QueryChunk(stage, *chunk, tokens) for stage in self.schedule.stages for chunk in self.loops.chunks())


@dataclass(frozen=True)
class FewTiles(LayerContext):
    """A layer's context with the tiles of `loops`."""

    loops: Loops | None = None

    def tiles(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        return self.loops.tiles(first, self.tokens if last is None else last)


class _AllTiles:
    """The tiles of all tokens, as often as asked for."""

    def __init__(self, loops: Loops, tokens: int):
        self._loops, self._tokens = loops, tokens

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self._loops.tiles(0, self._tokens)


@dataclass(frozen=True)
class FewRows(Geometry):
    """Shapes of a rank's activations, kept in the tiles of `loops`."""

    loops: Loops | None = None

    @property
    def tiles(self) -> _AllTiles:
        return _AllTiles(self.loops, self.tokens)


@contextmanager
def few_loss_tiles(loops: Loops) -> Iterator[None]:
    """The output head takes the tiles of `loops`."""
    original = output_head.tiles
    output_head.tiles = lambda tokens, tile_size: loops.tiles(0, tokens)
    try:
        yield
    finally:
        output_head.tiles = original
