"""Which heads travel when: the schedule of Ulysses and UPipe as pure arithmetic.

UPipe (arXiv 2602.21196) runs the attention of a layer in `H / U` stages of `U` query heads. Only `U` heads of q, k, v and o
are in flight at a time, so the buffers that span the whole sequence are `H / U` times smaller than Ulysses' own. Ulysses is
the schedule with one stage (`U = H`).

Heads keep their natural order. Rank `r` of the Ulysses group owns query heads `[r·H/cu, (r+1)·H/cu)`. With the query weight
viewed as `[cu, H/cu, D, d]`, a stage is the slice `[:, q_start:q_stop]`: one run of `U/cu` heads for every rank.

Worked example, 12 query heads, 4 KV heads (3 query heads share one), 2 ranks, U = 4:

    stage   rank 0 queries (KV)     rank 1 queries (KV)      KV heads that travel
    0       q0 q1   (kv0 kv0)       q6  q7   (kv2 kv2)       kv0 → rank 0, kv2 → rank 1
    1       q2 q3   (kv0 kv1)       q8  q9   (kv2 kv3)       kv1 → rank 0, kv3 → rank 1; kv0 and kv2 are held since stage 0
    2       q4 q5   (kv1 kv1)       q10 q11  (kv3 kv3)       none

>>> schedule = build_head_schedule(num_heads=12, num_kv_heads=4, ulysses_degree=2, heads_per_stage=4)
>>> [list(schedule.query_heads(stage, rank=1)) for stage in schedule.stages]
[[6, 7], [8, 9], [10, 11]]
>>> [list(schedule.new_kv_heads(stage, rank=1)) for stage in schedule.stages]
[[2], [3], []]
>>> schedule.stages[1].runs
(AttentionRun(q_start=0, q_count=1, arrival=0, kv_start=0, kv_count=1), AttentionRun(q_start=1, q_count=1, arrival=1, kv_start=0, kv_count=1))

Letters: H query heads, K key/value heads, D head dim, d hidden size, cu Ulysses degree, U query heads per stage over the group.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class AttentionRun:
    """One attention call of a stage on one rank; the same for every rank.

    Query heads `[q_start, q_start + q_count)` of the stage against KV heads `[kv_start, kv_start + kv_count)` of those that
    arrived in stage `arrival`. `q_count` is a multiple of `kv_count`: plain grouped-query attention.
    """

    q_start: int
    q_count: int
    arrival: int
    kv_start: int
    kv_count: int


@dataclass(frozen=True)
class Stage:
    """One stage. Head numbers are local to a rank: slices of `[cu, H/cu, D, d]` and of `[groups, K/groups, D, d]`."""

    index: int
    q_start: int
    q_stop: int
    kv_start: int  # KV heads that are new in this stage; kv_start == kv_stop when all that is needed is held already
    kv_stop: int
    runs: tuple[AttentionRun, ...]
    releases: tuple[int, ...]  # stages whose KV heads are used here for the last time

    @property
    def num_queries(self) -> int:
        """Query heads of this stage on one rank, `U / cu`."""
        return self.q_stop - self.q_start

    @property
    def num_new_kv(self) -> int:
        """KV heads that one rank receives in this stage."""
        return self.kv_stop - self.kv_start


@dataclass(frozen=True)
class HeadSchedule:
    """The stages of one layer's attention; made by `build_head_schedule`."""

    num_heads: int
    num_kv_heads: int
    ulysses_degree: int
    heads_per_stage: int
    stages: tuple[Stage, ...]

    @property
    def heads_per_rank(self) -> int:
        return self.num_heads // self.ulysses_degree

    @property
    def kv_groups(self) -> int:
        """First dimension of the KV weight view `[kv_groups, K/kv_groups, D, d]`: `min(cu, K)`."""
        return min(self.ulysses_degree, self.num_kv_heads)

    @property
    def kv_heads_per_rank(self) -> int:
        return self.num_kv_heads // self.kv_groups

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same KV head: 1 unless `K < cu`. Their gradients are summed."""
        return self.ulysses_degree // self.kv_groups

    def query_heads(self, stage: Stage, rank: int) -> range:
        """Query heads, numbered as in the model, whose attention `rank` computes in `stage`."""
        first = rank * self.heads_per_rank
        return range(first + stage.q_start, first + stage.q_stop)

    def new_kv_heads(self, stage: Stage, rank: int) -> range:
        """KV heads, numbered as in the model, that `rank` receives in `stage`."""
        first = rank // self.kv_copies * self.kv_heads_per_rank
        return range(first + stage.kv_start, first + stage.kv_stop)


@lru_cache
def build_head_schedule(num_heads: int, num_kv_heads: int, ulysses_degree: int, heads_per_stage: int) -> HeadSchedule:
    """Schedule of `num_heads` query heads and `num_kv_heads` KV heads over `ulysses_degree` ranks.

    A KV head is sent in the first stage that needs it and held until the last one that does, so it never travels twice.

    Raises ValueError naming the flag when the numbers do not divide: `cu | H`, `K | H`, `cu | K` or `K | cu`, `cu | U`, `U | H`.
    """
    check_heads(num_heads, num_kv_heads, ulysses_degree, heads_per_stage)
    queries_per_kv = num_heads // num_kv_heads
    queries_per_stage = heads_per_stage // ulysses_degree
    num_stages = num_heads // heads_per_stage

    def local_kv(local_query: int) -> int:
        return local_query // queries_per_kv if num_kv_heads >= ulysses_degree else 0

    def needed(index: int) -> list[int]:
        return [local_kv(q) for q in range(index * queries_per_stage, (index + 1) * queries_per_stage)]

    arrival_of: dict[int, tuple[int, int]] = {}  # local KV head -> (stage it arrives in, position among that stage's)
    last_use = {}  # arrival stage -> last stage that uses it
    ranges, runs = [], []
    for index in range(num_stages):
        kv_of_query = needed(index)
        held = len(arrival_of)
        for kv in sorted(set(kv_of_query) - arrival_of.keys()):
            arrival_of[kv] = (index, kv - held)
        ranges.append((held, len(arrival_of)))
        runs.append(_attention_runs(kv_of_query, arrival_of))
        for run in runs[-1]:
            last_use[run.arrival] = index
    stages = tuple(
        Stage(
            index=index,
            q_start=index * queries_per_stage,
            q_stop=(index + 1) * queries_per_stage,
            kv_start=ranges[index][0],
            kv_stop=ranges[index][1],
            runs=runs[index],
            releases=tuple(arrival for arrival, last in last_use.items() if last == index),
        )
        for index in range(num_stages)
    )
    return HeadSchedule(num_heads, num_kv_heads, ulysses_degree, heads_per_stage, stages)


def _attention_runs(kv_of_query: list[int], arrival_of: dict[int, tuple[int, int]]) -> tuple[AttentionRun, ...]:
    """Cuts a stage's queries into calls in which every KV head serves the same number of neighbouring queries."""
    single: list[AttentionRun] = []  # one KV head a run
    for position, kv in enumerate(kv_of_query):
        if position and kv == kv_of_query[position - 1]:
            last = single[-1]
            single[-1] = AttentionRun(last.q_start, last.q_count + 1, last.arrival, last.kv_start, 1)
        else:
            single.append(AttentionRun(position, 1, *arrival_of[kv], 1))
    merged: list[AttentionRun] = []
    for run in single:
        last = merged[-1] if merged else None
        joins = last and run.arrival == last.arrival and run.kv_start == last.kv_start + last.kv_count
        if joins and run.q_count * last.kv_count == last.q_count:
            merged[-1] = AttentionRun(last.q_start, last.q_count + run.q_count, last.arrival, last.kv_start, last.kv_count + 1)
        else:
            merged.append(run)
    return tuple(merged)


def legal_heads_per_stage(num_heads: int, ulysses_degree: int) -> list[int]:
    """Every `U` that a schedule accepts: multiples of `ulysses_degree` that divide `num_heads`, ascending."""
    return [u for u in range(ulysses_degree, num_heads + 1, ulysses_degree) if num_heads % u == 0]


def legal_ulysses_degrees(num_heads: int, num_kv_heads: int) -> list[int]:
    """Every `cu` that a schedule accepts for these heads, ascending."""
    return [cu for cu in range(1, num_heads + 1) if num_heads % cu == 0 and kv_heads_fit(num_kv_heads, cu)]


def kv_heads_fit(num_kv_heads: int, ulysses_degree: int) -> bool:
    """Each rank has equally many KV heads, or equally many ranks share one."""
    return num_kv_heads % ulysses_degree == 0 or ulysses_degree % num_kv_heads == 0


def check_heads(num_heads: int, num_kv_heads: int, ulysses_degree: int, heads_per_stage: int) -> None:
    """Raises ValueError naming the flag and the values that work when the numbers do not divide."""
    if min(num_heads, num_kv_heads, ulysses_degree, heads_per_stage) < 1:
        raise ValueError("head counts, --context-parallel-size and --upipe-heads-per-stage must be at least 1")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"--num-query-groups {num_kv_heads} does not divide --num-attention-heads {num_heads}; "
            f"{_nearest_divisor(num_heads, num_kv_heads)} does"
        )
    degrees = legal_ulysses_degrees(num_heads, num_kv_heads)
    if ulysses_degree not in degrees:
        raise ValueError(
            f"--context-parallel-size {ulysses_degree} does not fit {num_heads} query heads and {num_kv_heads} KV heads: it must "
            "divide the query heads, and divide the KV heads or be a multiple of them; "
            f"{' or '.join(map(str, degrees))} {'do' if len(degrees) > 1 else 'does'}"
        )
    stages = legal_heads_per_stage(num_heads, ulysses_degree)
    if heads_per_stage not in stages:
        raise ValueError(
            f"--upipe-heads-per-stage {heads_per_stage} must be a multiple of the Ulysses degree {ulysses_degree} that divides "
            f"--num-attention-heads {num_heads}; {' or '.join(map(str, stages))} {'do' if len(stages) > 1 else 'does'}"
        )


def _nearest_divisor(number: int, value: int) -> int:
    return min((x for x in range(1, number + 1) if number % x == 0), key=lambda x: abs(x - value))
