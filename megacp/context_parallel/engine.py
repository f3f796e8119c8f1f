"""The context-parallel engine: runs a layer's attention stage by stage, forward and backward.

The engine knows heads, ranks and documents, and nothing of projections: the layer gives it functions that fill a stage's send
buffer (`pack_*`) and take what comes back (`unpack_*`). One engine serves Ulysses (one stage) and UPipe (`H/U` stages).

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


PackQ = Callable[[Stage, int, int], torch.Tensor]
PackKV = Callable[[Stage], tuple[torch.Tensor, torch.Tensor]]
UnpackDQ = Callable[[Stage, int, int, torch.Tensor], None]
UnpackDKV = Callable[[Stage, torch.Tensor, torch.Tensor], None]
Received = dict[tuple[int, int], tuple[tuple[Exchange, Exchange] | None, Exchange]]  # (stage, start of the chunk): (k and v), q


def stages_forward(
    settings: AttentionSettings, pack_q: PackQ, pack_kv: PackKV, outputs: StageShelf, log_sum_exps: BlockShelf,
    received: Received | None = None,
) -> None:  # fmt: skip
    """Attention of all heads; puts each stage's output o_CtnD of this rank's tokens and its log-sum-exp lse_nS on their shelves.

    `pack_q(stage, start, stop)` returns q_CtnD of a chunk and `pack_kv(stage)` k_CTmD, v_CTmD, the send buffers; block `r` is for
    rank `r`. Block `r` of an output holds the heads `schedule.query_heads(stage, r)`. `lse_nS` stays where it was computed: heads
    of this rank. `received`, if given, keeps q, k and v for the backward, which else packs and sends them again.
    """

    def begin(chunk: QueryChunk):
        kv = _begin_kv(settings, pack_kv(chunk.stage)) if chunk.opens_stage and chunk.stage.num_new_kv else None
        q_CtnD = pack_q(chunk.stage, chunk.start, chunk.stop)
        outputs.flush()  # the copy of the output put last ran under the packing, and its memory serves the exchange
        q = _begin(settings, q_CtnD)
        return kv, q

    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    lse_parts: list[torch.Tensor] = []
    returning: list[Callable[[], None]] = []
    for chunk, (kv, q) in _ahead(settings, begin):
        _finish(returning)
        if received is not None:
            received[chunk.stage.index, chunk.start] = kv, q
        if kv is not None:
            held_kv[chunk.stage.index] = _arrived(*kv)
        (q_XnD,) = _arrived(q)
        del kv, q
        o_XnD, lse_nX = _attend(settings, chunk.stage, settings.runs_of(chunk.start, chunk.stop), q_XnD, held_kv)
        del q_XnD
        o = _begin_to_tokens(settings, o_XnD)
        returning.append(partial(_put, outputs, chunk, o))
        lse_parts.append(lse_nX.unflatten(1, (settings.schedule.ulysses_degree, -1)))
        del o, o_XnD, lse_nX
        if not settings.prefetch:
            _finish(returning)
        if chunk.closes_stage:
            lse_nCT = lse_parts[0] if len(lse_parts) == 1 else torch.cat(lse_parts, dim=2)
            lse_parts = []
            log_sum_exps.put(chunk.stage.index, lse_nCT.flatten(1))
            del lse_nCT
            for arrival in chunk.stage.releases:
                del held_kv[arrival]
    _finish(returning)


def stages_backward(
    settings: AttentionSettings, pack_q: PackQ, pack_kv: PackKV, outputs: StageShelf, log_sum_exps: BlockShelf,
    pack_do: PackQ, unpack_dq: UnpackDQ, unpack_dkv: UnpackDKV, received: Received | None = None,
) -> None:  # fmt: skip
    """Backward of `stages_forward`; attention itself is not run again.

    Takes what the forward put and releases each stage when it is done; its fetch runs under the stage's projections.
    `pack_do(stage, start, stop)` returns the gradient of a chunk of the stage's output, as a send buffer.
    `unpack_dq(stage, start, stop, dq_CtnD)` is called once a chunk, `unpack_dkv(arrival_stage, dk_CTmD, dv_CTmD)` once for each stage
    that brought KV heads, after the last stage that uses them; block `r` comes from rank `r`. With `K < cu` several blocks hold
    gradients of one KV head: the receiver sums them. `received` is what the forward kept, and is emptied.
    """
    schedule = settings.schedule

    def begin(chunk: QueryChunk):
        stage, start, stop = chunk.stage, chunk.start, chunk.stop
        lse = log_sum_exps.fetch(stage.index) if chunk.opens_stage else None
        output = outputs.fetch(stage.index, start, stop)
        if received is not None:
            kv, q = received.pop((stage.index, start))
        else:
            kv = _begin_kv(settings, pack_kv(stage)) if chunk.opens_stage and stage.num_new_kv else None
            q = _begin(settings, pack_q(stage, start, stop))
        do = _begin(settings, pack_do(stage, start, stop))
        o = _begin(settings, output.wait().contiguous())
        if chunk.closes_stage:
            outputs.release(stage.index)
        return lse, kv, (do, q, o)

    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kv_grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    returning: list[Callable[[], None]] = []
    lse_nCT = None
    for chunk, (lse, kv, arriving) in _ahead(settings, begin):
        _finish(returning)
        if lse is not None:
            lse_nCT = lse.wait().unflatten(1, (schedule.ulysses_degree, -1))
        if kv is not None:
            held_kv[chunk.stage.index] = _arrived(*kv)
        do_XnD, q_XnD, o_XnD = _arrived(*arriving)
        del lse, kv, arriving
        lse_nX = lse_nCT[:, :, chunk.start : chunk.stop].flatten(1)
        runs = settings.runs_of(chunk.start, chunk.stop)
        dq_XnD = _attend_backward(settings, chunk.stage, runs, do_XnD, q_XnD, o_XnD, lse_nX, held_kv, kv_grads)
        del q_XnD, o_XnD, do_XnD, lse_nX
        dq = _begin_to_tokens(settings, dq_XnD)
        returning.append(partial(_unpack_dq, unpack_dq, chunk, dq))
        del dq, dq_XnD
        if not settings.prefetch:
            _finish(returning)
        for arrival in chunk.stage.releases if chunk.closes_stage else ():
            dtype = held_kv.pop(arrival)[0].dtype
            dk_SmD, dv_SmD = (total.to(dtype) for total in kv_grads.pop(arrival))
            dk, dv = _begin_to_tokens(settings, dk_SmD), _begin_to_tokens(settings, dv_SmD)
            returning.append(partial(_unpack_dkv, unpack_dkv, schedule.stages[arrival], dk, dv))
            del dk_SmD, dv_SmD, dk, dv
            if not settings.prefetch:
                _finish(returning)
    _finish(returning)


def _ahead(settings: AttentionSettings, begin: Callable[[QueryChunk], Begun]) -> Iterator[tuple[QueryChunk, Begun]]:
    """Each chunk with what `begin` made of it; with `prefetch`, the next one is begun before. Keeps nothing of what it gave out."""
    begun = []
    for chunk in settings.chunks:
        begun.append((chunk, begin(chunk)))
        if len(begun) > settings.prefetch:
            yield begun.pop(0)
    while begun:
        yield begun.pop(0)


def _finish(returning: list[Callable[[], None]]) -> None:
    """What chunks have sent back is taken in, in order."""
    while returning:
        returning.pop(0)()


def _put(outputs: StageShelf, chunk: QueryChunk, o: Exchange) -> None:
    outputs.put(chunk.stage.index, chunk.start, chunk.stop, o.wait())


def _unpack_dq(unpack_dq: UnpackDQ, chunk: QueryChunk, dq: Exchange) -> None:
    unpack_dq(chunk.stage, chunk.start, chunk.stop, dq.wait())


def _unpack_dkv(unpack_dkv: UnpackDKV, arrival: Stage, dk: Exchange, dv: Exchange) -> None:
    unpack_dkv(arrival, dk.wait(), dv.wait())


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


def _begin_kv(settings: AttentionSettings, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[Exchange, Exchange]:
    k_CTmD, v_CTmD = packed
    return _begin(settings, k_CTmD), _begin(settings, v_CTmD)


def _begin_to_tokens(settings: AttentionSettings, x_XnD: torch.Tensor) -> Exchange:
    """`[C·t, n, D]`: this rank's heads of all ranks' tokens → `[C, t, n, D]`: this rank's tokens, block `r` the heads of rank `r`."""
    ranks = settings.schedule.ulysses_degree
    return _begin(settings, x_XnD.contiguous().view(ranks, -1, *x_XnD.shape[1:]))


def _arrived(*exchanges: Exchange) -> tuple[torch.Tensor, ...]:
    """`[C, t, n, D]`, block `r` from rank `r` → `[C·t, n, D]`: this rank's heads of the chunk's tokens of all ranks."""
    return tuple(exchange.wait().flatten(0, 1) for exchange in exchanges)
