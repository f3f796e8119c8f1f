"""The context-parallel engine: runs a layer's attention stage by stage, forward and backward.

The engine knows heads, ranks and documents, and nothing of projections: the layer gives it a function that takes the gradients
which came back and fills the send buffers of the next chunk. Both at a time, so that the layer reads its input once for them, which
matters where that comes from the host. One engine serves Ulysses (one stage) and UPipe (`H/U` stages).

Letters: C ranks of the group, T tokens on a rank, S = C·T, n query heads of a stage on a rank (U/cu), m KV heads that are new,
D head dim, t tokens of a query chunk on a rank. A `[C, T, n, D]` from an all-to-all is `[S, n, D]` (see `all_to_all`).

Worked example, Llama3-8B on 8 ranks, 1M tokens, U = 8: T = 131,072, four stages; in each a rank packs q_CTnD `[8, T, 1, 128]`
(256 MiB), exchanges it, and computes one query head of all S = 1,048,576 tokens; k and v travel in the first stage only.

Query chunks take the stage's queries, outputs and their gradients `t` tokens of every rank at a time, against resident k and v. The
chunk `[a, b)` is C runs of the sequence, `[r·T + a, r·T + b)` for each rank `r`, and each run sees the keys of its documents up to
itself. Only k, v and their gradients (fp32 sums over the chunks) then span the sequence.

With `prefetch` what a chunk needs is projected and sent before the attention of the chunk before it, and what a chunk made returns
while the next but one is projected:

    compute     pack 0   pack 1   attention 0   pack 2   attention 1   pack 3   attention 2
    exchange             q 0      q 1           o 0      q 2           o 1      q 3

One more chunk's buffers are alive then. Without, exchanges and attention take turns. What is computed stays on one stream: packing on
a second one, under the attention, hid the reading of h from the host, and cost more than it gained. Measured on an H200 at 1M tokens, h on
the host, FlashAttention-4: forward 2.23 s instead of 1.85, presumably as its persistent kernel waits for a processor that a small one
took; backward 5.08 instead of 5.15.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from megacp.context_parallel.all_to_all import Exchange, Loopback, all_to_all
from megacp.context_parallel.head_schedule import HeadSchedule, Stage
from megacp.kernels.attention import Documents, attention_backward, attention_forward
from megacp.kernels.precision import compute_dtype

Begun = TypeVar("Begun")
Result = TypeVar("Result")


class StageShelf(Protocol):
    """Keeps a tensor a stage, tokens `[start, stop)` of it at a time; see `megacp.memory.shelves`."""

    def put(self, stage: int, start: int, stop: int, x_CtnD: torch.Tensor) -> None: ...
    def fetch(self, stage: int, start: int, stop: int): ...  # an object whose wait() gives the tensor
    def release(self, stage: int) -> None: ...
    def flush(self) -> None: ...  # what was put is on the shelf


class BlockShelf(Protocol):
    """Keeps one tensor a stage."""

    def put(self, stage: int, x: torch.Tensor) -> None: ...
    def fetch(self, stage: int): ...  # the same, for the last time


@dataclass(frozen=True)
class AttentionSettings:
    """What every attention call of a micro-batch shares. `scale` multiplies q·k; `backend` is a name `select_backend` gave.

    `query_chunk`: tokens of each rank whose queries are in flight at a time; None: all. `prefetch`: see the module. `deterministic`:
    backward gives the same bits for the same inputs; the backend was selected so.
    """

    schedule: HeadSchedule
    group: dist.ProcessGroup | Loopback | None
    documents: Documents
    scale: float
    backend: str
    query_chunk: int | None = None
    prefetch: bool = False
    deterministic: bool = False

    @property
    def tokens_per_rank(self) -> int:
        return self.documents.total // self.schedule.ulysses_degree

    @property
    def chunks(self) -> list["QueryChunk"]:
        """All query chunks in the order of computation."""
        tokens = self.tokens_per_rank
        size = self.query_chunk or tokens
        starts = range(0, tokens, size)
        return [QueryChunk(stage, start, min(start + size, tokens), tokens) for stage in self.schedule.stages for start in starts]

    def runs_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The runs of the sequence that a chunk consists of: one for each rank, or the whole sequence at once."""
        tokens = self.tokens_per_rank
        if (start, stop) == (0, tokens):
            return [(0, self.documents.total)]
        return [(r * tokens + start, r * tokens + stop) for r in range(self.schedule.ulysses_degree)]


class QueryChunk(NamedTuple):
    """Tokens `[start, stop)` of each rank's `tokens`, of the queries of a stage."""

    stage: Stage
    start: int
    stop: int
    tokens: int

    @property
    def opens_stage(self) -> bool:
        return self.start == 0

    @property
    def closes_stage(self) -> bool:
        return self.stop == self.tokens

    @property
    def brings_kv(self) -> bool:
        return self.opens_stage and self.stage.num_new_kv > 0


class QueryGradient(NamedTuple):
    """Of a chunk's queries; block `r` comes from rank `r`."""

    chunk: QueryChunk
    dq_CtnD: torch.Tensor


class KVGradient(NamedTuple):
    """Of the KV heads that `stage` brought; block `r` comes from rank `r`. With `K < cu` several blocks hold gradients of one KV head."""

    stage: Stage
    dk_CTmD: torch.Tensor
    dv_CTmD: torch.Tensor


Gradient = QueryGradient | KVGradient
Turn = Callable[[list[Gradient], QueryChunk | None], list[torch.Tensor]]
PackDO = Callable[[Stage, int, int], torch.Tensor]
Received = dict[tuple[int, int], list[Exchange]]  # (stage, start of the chunk): q, and k and v where they are new


def stages_forward(
    settings: AttentionSettings, turn: Turn, outputs: StageShelf, log_sum_exps: BlockShelf, received: Received | None = None
) -> None:
    """Attention of all heads; puts each stage's output o_CtnD of this rank's tokens and its log-sum-exp lse_nS on their shelves.

    `turn([], chunk)` returns the send buffers of a chunk, block `r` for rank `r`: q_CtnD, and k_CTmD and v_CTmD if it `brings_kv`.
    Block `r` of an output holds the heads `schedule.query_heads(stage, r)`. `lse_nS` stays where it was computed: heads of this
    rank. `received`, if given, keeps q, k and v for the backward, which else packs and sends them again.
    """

    def begin(chunk: QueryChunk):
        sends = turn([], chunk)
        outputs.flush()  # the copy of the output put last ran under the packing, and its memory serves the exchange
        q = _begin(settings, sends.pop(0))
        kv = _send(settings, sends)
        return [q, *kv]

    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    lse_parts: list[torch.Tensor] = []
    returning: list[Callable[[], None]] = []
    for chunk, arriving in _ahead(settings, begin):
        _results(returning)
        if received is not None:
            received[chunk.stage.index, chunk.start] = arriving
        q_XnD, *kv = _arrived(arriving)
        if kv:
            held_kv[chunk.stage.index] = tuple(kv)
        del arriving, kv
        o_XnD, lse_nX = _attend(settings, chunk.stage, settings.runs_of(chunk.start, chunk.stop), q_XnD, held_kv)
        del q_XnD
        o = _begin_to_tokens(settings, o_XnD)
        returning.append(partial(_put, outputs, chunk, o))
        lse_parts.append(lse_nX.unflatten(1, (settings.schedule.ulysses_degree, -1)))
        del o, o_XnD, lse_nX
        if not settings.prefetch:
            _results(returning)
        if chunk.closes_stage:
            lse_nCT = lse_parts[0] if len(lse_parts) == 1 else torch.cat(lse_parts, dim=2)
            lse_parts = []
            log_sum_exps.put(chunk.stage.index, lse_nCT.flatten(1))
            del lse_nCT
            for arrival in chunk.stage.releases:
                del held_kv[arrival]
    _results(returning)


def stages_backward(
    settings: AttentionSettings, turn: Turn, pack_do: PackDO, outputs: StageShelf, log_sum_exps: BlockShelf,
    received: Received | None = None,
) -> list[Gradient]:  # fmt: skip
    """Backward of `stages_forward`; attention itself is not run again. Returns the gradients that came back last.

    Takes what the forward put and releases each stage when it is done; its fetch runs under the stage's projections.
    `turn(gradients, chunk)` takes gradients that came back, and returns send buffers as in the forward (of no chunk: none).
    `pack_do(stage, start, stop)` returns the gradient of a chunk of the stage's output, as a send buffer. Gradients of queries come
    once a chunk, those of keys and values once for each stage that brought some, after the last stage that uses them. `received` is
    what the forward kept, and is emptied.
    """
    schedule = settings.schedule
    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kv_grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    returning: list[Callable[[], Gradient]] = []
    lse_nCT = None

    def begin(chunk: QueryChunk):
        stage, start, stop = chunk.stage, chunk.start, chunk.stop
        lse = log_sum_exps.fetch(stage.index) if chunk.opens_stage else None
        output = outputs.fetch(stage.index, start, stop)
        # With prefetch what comes back is on its way while this chunk is packed, and is taken after that.
        sends = turn([] if settings.prefetch else _results(returning), None if received is not None else chunk)
        if received is None:
            q = _begin(settings, sends.pop(0))
            kv = _send(settings, sends)
        else:
            q, *kv = received.pop((stage.index, start))
        do = _begin(settings, pack_do(stage, start, stop))
        o = _begin(settings, output.wait().contiguous())
        if chunk.closes_stage:
            outputs.release(stage.index)
        return lse, [do, o, q, *kv]

    for chunk, (lse, arriving) in _ahead(settings, begin):
        if returning:
            turn(_results(returning), None)
        if lse is not None:
            lse_nCT = lse.wait().unflatten(1, (schedule.ulysses_degree, -1))
        do_XnD, o_XnD, q_XnD, *kv = _arrived(arriving)
        if kv:
            held_kv[chunk.stage.index] = tuple(kv)
        del lse, arriving, kv
        lse_nX = lse_nCT[:, :, chunk.start : chunk.stop].flatten(1)
        runs = settings.runs_of(chunk.start, chunk.stop)
        dq_XnD = _attend_backward(settings, chunk.stage, runs, do_XnD, q_XnD, o_XnD, lse_nX, held_kv, kv_grads)
        del q_XnD, o_XnD, do_XnD, lse_nX
        dq = _begin_to_tokens(settings, dq_XnD)
        returning.append(partial(_query_gradient, chunk, dq))
        del dq, dq_XnD
        for arrival in chunk.stage.releases if chunk.closes_stage else ():
            dtype = held_kv.pop(arrival)[0].dtype
            dk_SmD, dv_SmD = (total.to(dtype) for total in kv_grads.pop(arrival))
            dk, dv = _begin_to_tokens(settings, dk_SmD), _begin_to_tokens(settings, dv_SmD)
            returning.append(partial(_kv_gradient, schedule.stages[arrival], dk, dv))
            del dk_SmD, dv_SmD, dk, dv
    return _results(returning)


def _ahead(settings: AttentionSettings, begin: Callable[[QueryChunk], Begun]) -> Iterator[tuple[QueryChunk, Begun]]:
    """Each chunk with what `begin` made of it; with `prefetch`, the next one is begun before. Keeps nothing of what it gave out."""
    begun = []
    for chunk in settings.chunks:
        begun.append((chunk, begin(chunk)))
        if len(begun) > settings.prefetch:
            yield begun.pop(0)
    while begun:
        yield begun.pop(0)


def _results(returning: list[Callable[[], Result]]) -> list[Result]:
    """What chunks have sent back, in order; the list is emptied."""
    return [returning.pop(0)() for _ in range(len(returning))]


def _put(outputs: StageShelf, chunk: QueryChunk, o: Exchange) -> None:
    outputs.put(chunk.stage.index, chunk.start, chunk.stop, o.wait())


def _query_gradient(chunk: QueryChunk, dq: Exchange) -> QueryGradient:
    return QueryGradient(chunk, dq.wait())


def _kv_gradient(arrival: Stage, dk: Exchange, dv: Exchange) -> KVGradient:
    return KVGradient(arrival, dk.wait(), dv.wait())


def _attend(settings, stage, runs, q_XnD, held_kv):
    """The attention calls of a chunk, whose queries are `runs` of the sequence laid end to end.

    One call, without a copy, when the chunk is the whole and the stage's queries share KV heads evenly.
    """
    outputs, log_sum_exps, row = [], [], 0
    for first, last in runs:
        origin, documents = settings.documents.of_rows(first, last)
        q_rnD, row = q_XnD[row : row + last - first], row + last - first
        results = []
        for heads in stage.runs:
            k, v = (_heads(x, heads.kv_start, heads.kv_count)[origin:last] for x in held_kv[heads.arrival])
            q = _heads(q_rnD, heads.q_start, heads.q_count)
            results.append(attention_forward(q, k, v, documents, settings.scale, settings.backend))
        outputs.append(_cat([o for o, _ in results], dim=1))
        log_sum_exps.append(_cat([lse for _, lse in results], dim=0))
    return _cat(outputs, dim=0), _cat(log_sum_exps, dim=1)


def _attend_backward(settings, stage, runs, do_XnD, q_XnD, o_XnD, lse_nX, held_kv, kv_grads):
    """Returns dq_XnD; adds to `kv_grads[arrival]`, made at the first use as large as what arrived."""
    dq_runs, row, whole = [], 0, len(q_XnD) == settings.documents.total
    for first, last in runs:
        origin, documents = settings.documents.of_rows(first, last)
        rows, row = slice(row, row + last - first), row + last - first
        dq_heads = []
        for heads in stage.runs:
            k_SmD, v_SmD = held_kv[heads.arrival]
            k, v = (_heads(x, heads.kv_start, heads.kv_count)[origin:last] for x in (k_SmD, v_SmD))
            do, q, o = (_heads(x[rows], heads.q_start, heads.q_count) for x in (do_XnD, q_XnD, o_XnD))
            lse = lse_nX[heads.q_start : heads.q_start + heads.q_count, rows]
            dq, dk, dv = attention_backward(
                do, q, k, v, o, lse, documents, settings.scale, settings.backend, settings.deterministic
            )
            dq_heads.append(dq)
            if heads.arrival not in kv_grads and dk.shape == k_SmD.shape and whole:
                kv_grads[heads.arrival] = dk, dv
                continue
            if heads.arrival not in kv_grads:
                # Many chunks add up: in fp32. The stages of unchunked queries are few: in the tensors' own precision.
                dtype = k_SmD.dtype if whole else compute_dtype(k_SmD.dtype)
                kv_grads[heads.arrival] = tuple(torch.zeros_like(x, dtype=dtype) for x in (k_SmD, v_SmD))
            for total_SmD, part in zip(kv_grads[heads.arrival], (dk, dv)):
                _heads(total_SmD, heads.kv_start, heads.kv_count)[origin:last] += part
            del dk, dv, part  # before the next call makes its own
        dq_runs.append(_cat(dq_heads, dim=1))
    return _cat(dq_runs, dim=0)


def _heads(x_SnD, start, count):
    return x_SnD[:, start : start + count]


def _cat(parts, dim):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _begin(settings: AttentionSettings, send_C: torch.Tensor) -> Exchange:
    """Without `prefetch` it is there at once."""
    exchange = all_to_all(send_C, settings.group)
    if not settings.prefetch:
        exchange.wait()
    return exchange


def _send(settings: AttentionSettings, sends: list[torch.Tensor]) -> list[Exchange]:
    """Empties the list: the memory of a send buffer is free when its exchange is over."""
    return [_begin(settings, sends.pop(0)) for _ in range(len(sends))]


def _begin_to_tokens(settings: AttentionSettings, x_XnD: torch.Tensor) -> Exchange:
    """`[C·t, n, D]`: this rank's heads of all ranks' tokens → `[C, t, n, D]`: this rank's tokens, block `r` the heads of rank `r`."""
    ranks = settings.schedule.ulysses_degree
    return _begin(settings, x_XnD.contiguous().view(ranks, -1, *x_XnD.shape[1:]))


def _arrived(exchanges: list[Exchange]) -> list[torch.Tensor]:
    """`[C, t, n, D]`, block `r` from rank `r` → `[C·t, n, D]`: this rank's heads of the chunk's tokens of all ranks."""
    return [exchange.wait().flatten(0, 1) for exchange in exchanges]
