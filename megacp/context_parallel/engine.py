"""The context-parallel engine: runs a layer's attention stage by stage, forward and backward.

The engine knows heads, ranks and documents, and nothing of projections: the layer gives it functions that fill a stage's send
buffer (`pack_*`) and take what comes back (`unpack_*`). One engine serves Ulysses (one stage) and UPipe (`H/U` stages).

Letters: C ranks of the group, T tokens on a rank, S = C·T, n query heads of a stage on a rank (U/cu), m KV heads that are new,
D head dim. A `[C, T, n, D]` from an all-to-all is `[S, n, D]` (see `all_to_all`).

Worked example, Llama3-8B on 8 ranks, 1M tokens, U = 8: T = 131,072, four stages; in each a rank packs q_CTnD `[8, T, 1, 128]`
(256 MiB), exchanges it, and computes one query head of all S = 1,048,576 tokens; k and v travel in the first stage only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megacp.context_parallel.all_to_all import all_to_all
from megacp.context_parallel.head_schedule import HeadSchedule, Stage
from megacp.kernels.attention import Documents, attention_backward, attention_forward


class StageShelf(Protocol):
    """Keeps a tensor a stage; see `megacp.memory.shelves`."""

    def put(self, stage: int, x: torch.Tensor) -> None: ...
    def fetch(self, stage: int): ...  # an object whose wait() gives the tensor, for the last time


@dataclass(frozen=True)
class AttentionSettings:
    """What every attention call of a micro-batch shares. `scale` multiplies q·k; `backend` is a name `select_backend` gave."""

    schedule: HeadSchedule
    group: dist.ProcessGroup | None
    documents: Documents
    scale: float
    backend: str


def stages_forward(
    settings: AttentionSettings,
    pack_q: Callable[[Stage], torch.Tensor],
    pack_kv: Callable[[Stage], tuple[torch.Tensor, torch.Tensor]],
    outputs: StageShelf,
    log_sum_exps: StageShelf,
) -> None:
    """Attention of all heads; puts each stage's output o_CTnD of this rank's tokens and its log-sum-exp lse_nS on their shelves.

    `pack_q(stage)` returns q_CTnD and `pack_kv(stage)` k_CTmD, v_CTmD, the send buffers; block `r` is for rank `r`. Block `r`
    of an output holds the heads `schedule.query_heads(stage, r)`. `lse_nS` stays where it was computed: heads of this rank.
    """
    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for stage in settings.schedule.stages:
        if stage.num_new_kv:
            held_kv[stage.index] = _exchange_kv(settings, pack_kv(stage))
        q_SnD = _exchange_to_heads(settings, pack_q(stage))
        o_SnD, lse_nS = _attend(settings, stage, q_SnD, held_kv)
        del q_SnD
        outputs.put(stage.index, _exchange_to_tokens(settings, o_SnD))
        log_sum_exps.put(stage.index, lse_nS)
        del o_SnD, lse_nS
        for arrival in stage.releases:
            del held_kv[arrival]


def stages_backward(
    settings: AttentionSettings,
    pack_q: Callable[[Stage], torch.Tensor],
    pack_kv: Callable[[Stage], tuple[torch.Tensor, torch.Tensor]],
    outputs: StageShelf,
    log_sum_exps: StageShelf,
    output_grads: StageShelf,
    unpack_dq: Callable[[Stage, torch.Tensor], None],
    unpack_dkv: Callable[[Stage, torch.Tensor, torch.Tensor], None],
) -> None:
    """Backward of `stages_forward`; attention itself is not run again.

    Takes what the forward put and the gradients of `outputs`, each stage once, so that its memory is free when it is done;
    their fetches run under the stage's projections. `unpack_dq(stage, dq_CTnD)` is called once a stage, `unpack_dkv(arrival_stage,
    dk_CTmD, dv_CTmD)` once for each stage that brought KV heads, after the last stage that uses them; block `r` comes from
    rank `r`. With `K < cu` several blocks hold gradients of one KV head: the receiver sums them.
    """
    schedule = settings.schedule
    held_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kv_grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for stage in schedule.stages:
        kept = [shelf.fetch(stage.index) for shelf in (outputs, output_grads, log_sum_exps)]
        if stage.num_new_kv:
            held_kv[stage.index] = _exchange_kv(settings, pack_kv(stage))
        q_SnD = _exchange_to_heads(settings, pack_q(stage))
        o_CTnD, do_CTnD, lse_nS = (pending.wait() for pending in kept)
        del kept
        o_SnD = _exchange_to_heads(settings, o_CTnD)
        del o_CTnD
        do_SnD = _exchange_to_heads(settings, do_CTnD)
        del do_CTnD
        dq_SnD = _attend_backward(settings, stage, do_SnD, q_SnD, o_SnD, lse_nS, held_kv, kv_grads)
        del q_SnD, o_SnD, do_SnD, lse_nS
        unpack_dq(stage, _exchange_to_tokens(settings, dq_SnD))
        del dq_SnD
        for arrival in stage.releases:
            del held_kv[arrival]
            dk_SmD, dv_SmD = kv_grads.pop(arrival)
            unpack_dkv(
                schedule.stages[arrival], _exchange_to_tokens(settings, dk_SmD), _exchange_to_tokens(settings, dv_SmD)
            )


def _attend(settings, stage, q_SnD, held_kv):
    """The stage's attention calls. One call, without a copy, when the stage's queries share KV heads evenly."""

    def call(run):
        k, v = (x[:, run.kv_start : run.kv_start + run.kv_count] for x in held_kv[run.arrival])
        q = q_SnD[:, run.q_start : run.q_start + run.q_count]
        return attention_forward(q, k, v, settings.documents, settings.scale, settings.backend)

    results = [call(run) for run in stage.runs]
    if len(results) == 1:
        return results[0]
    return torch.cat([o for o, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=0)


def _attend_backward(settings, stage, do_SnD, q_SnD, o_SnD, lse_nS, held_kv, kv_grads):
    """Returns dq_SnD; adds to `kv_grads[arrival]`, made at the first use as large as what arrived."""
    dq_runs = []
    for run in stage.runs:
        heads = slice(run.q_start, run.q_start + run.q_count)
        kv_heads = slice(run.kv_start, run.kv_start + run.kv_count)
        k_SmD, v_SmD = held_kv[run.arrival]
        dq, dk, dv = attention_backward(
            do_SnD[:, heads], q_SnD[:, heads], k_SmD[:, kv_heads], v_SmD[:, kv_heads], o_SnD[:, heads], lse_nS[heads],
            settings.documents, settings.scale, settings.backend,
        )  # fmt: skip
        dq_runs.append(dq)
        if run.arrival in kv_grads:
            for total_SmD, part in zip(kv_grads[run.arrival], (dk, dv)):
                total_SmD[:, kv_heads] += part
        elif run.kv_count == k_SmD.shape[1]:
            kv_grads[run.arrival] = (dk, dv)
        else:
            totals = torch.zeros_like(k_SmD), torch.zeros_like(v_SmD)
            for total_SmD, part in zip(totals, (dk, dv)):
                total_SmD[:, kv_heads] += part
            kv_grads[run.arrival] = totals
    return dq_runs[0] if len(dq_runs) == 1 else torch.cat(dq_runs, dim=1)


def _exchange_kv(settings, packed):
    k_CTmD, v_CTmD = packed
    return _exchange_to_heads(settings, k_CTmD), _exchange_to_heads(settings, v_CTmD)


def _exchange_to_heads(settings, x_CTnD):
    """`[C, T, n, D]`, block `r` for rank `r` → `[S, n, D]`: this rank's heads of all tokens."""
    return all_to_all(x_CTnD, settings.group).flatten(0, 1)


def _exchange_to_tokens(settings, x_SnD):
    """`[S, n, D]`: this rank's heads of all tokens → `[C, T, n, D]`: this rank's tokens, block `r` the heads of rank `r`."""
    ranks = settings.schedule.ulysses_degree
    return all_to_all(x_SnD.contiguous().view(ranks, -1, *x_SnD.shape[1:]), settings.group)
