"""Who works with whom: pure rank arithmetic, and the process groups made from it.

A job of `W` ranks is a grid `pipeline x data x ring x ulysses`. The fastest coordinate comes last, so the
ranks of a Ulysses group, which exchange the most bytes, are neighbours on one node:

    rank = ((pipeline * data_parallel_size + data) * ring_degree + ring) * ulysses_degree + ulysses

Worked example, 16 ranks with context parallel 8 = Ulysses 4 x ring 2, which leaves data parallel 2:

    rank          0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    ulysses       0  1  2  3 | 0  1  2  3 | 0  1  2  3 | 0  1  2  3
    ring          0          | 1          | 0          | 1
    data          0                       | 1
    ulysses groups       [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]
    ring groups          [0 4] [1 5] [2 6] [3 7] [8 12] [9 13] [10 14] [11 15]
    context groups       [0 .. 7] [8 .. 15]         share one micro-batch: place c holds tokens [c*T, (c+1)*T)
    data groups          [0 8] [1 9] ... [7 15]     hold the same place of different micro-batches
    data_context groups  [0 .. 15]                  shard the weights and sum the gradients
    pipeline groups      [0] [1] ... [15]           one stage each

`ParallelLayout` is a function of numbers and needs no process. `initialize_model_parallel` makes the groups
of a layout once per process; the getters have Megatron's names.
"""

from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Coordinates(NamedTuple):
    """A rank's place in the grid, slowest coordinate first."""

    pipeline: int
    data: int
    ring: int
    ulysses: int


# The coordinates that differ inside a group of each kind; all others are equal.
VARYING_COORDINATES: dict[str, tuple[str, ...]] = {
    "ulysses": ("ulysses",),
    "ring": ("ring",),
    "context": ("ring", "ulysses"),
    "data": ("data",),
    "data_context": ("data", "ring", "ulysses"),
    "pipeline": ("pipeline",),
}


@dataclass(frozen=True)
class ParallelLayout:
    """How `world_size` ranks are divided; data parallelism is what the other two leave over.

    `ulysses_degree` None means the whole context group (ring degree 1).
    Raises ValueError naming the flag, the value and values that work.
    """

    world_size: int
    context_parallel_size: int = 1
    ulysses_degree: int | None = None
    pipeline_model_parallel_size: int = 1

    def __post_init__(self):
        for name, size in (
            ("the number of ranks", self.world_size),
            ("--context-parallel-size", self.context_parallel_size),
            ("--pipeline-model-parallel-size", self.pipeline_model_parallel_size),
            ("the Ulysses degree", 1 if self.ulysses_degree is None else self.ulysses_degree),
        ):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        world, context, pipeline = self.world_size, self.context_parallel_size, self.pipeline_model_parallel_size
        if world % pipeline:
            raise ValueError(
                f"--pipeline-model-parallel-size {pipeline} does not divide the job's {_ranks(world)}; "
                f"{_alternatives(world)}"
            )
        if world // pipeline % context:
            share = _ranks(world) if pipeline == 1 else (
                f"{_ranks(world // pipeline)} of a pipeline stage (--pipeline-model-parallel-size {pipeline})"
            )
            raise ValueError(
                f"--context-parallel-size {context} does not divide the job's {share}; "
                f"{_alternatives(world // pipeline)}"
            )
        if self.ulysses_degree is None:
            object.__setattr__(self, "ulysses_degree", context)
        if context % self.ulysses_degree:
            raise ValueError(
                f"a Ulysses degree of {self.ulysses_degree} does not divide --context-parallel-size {context}; "
                f"{_alternatives(context)}"
            )

    @property
    def ring_degree(self) -> int:
        return self.context_parallel_size // self.ulysses_degree

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (self.context_parallel_size * self.pipeline_model_parallel_size)

    @property
    def shape(self) -> Coordinates:
        """The extent of each coordinate."""
        return Coordinates(
            self.pipeline_model_parallel_size, self.data_parallel_size, self.ring_degree, self.ulysses_degree
        )

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the job's ranks 0..{self.world_size - 1}")
        rest, ulysses = divmod(rank, self.ulysses_degree)
        rest, ring = divmod(rest, self.ring_degree)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinates(pipeline, data, ring, ulysses)

    def rank_at(self, place: Coordinates) -> int:
        """The inverse of `coordinates`."""
        _, data, ring, ulysses = self.shape
        return ((place.pipeline * data + place.data) * ring + place.ring) * ulysses + place.ulysses

    def group_of(self, rank: int, kind: str) -> list[int]:
        """The ranks of the `kind` group that `rank` is in, ascending: a rank's index is its place in the group."""
        varying = VARYING_COORDINATES[kind]
        axes = [
            range(extent) if name in varying else (own,)
            for name, extent, own in zip(Coordinates._fields, self.shape, self.coordinates(rank))
        ]
        return [self.rank_at(Coordinates(*place)) for place in product(*axes)]

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of one kind ("ulysses", "ring", "context", "data", "data_context", "pipeline"), by first rank."""
        varying = VARYING_COORDINATES[kind]
        leaders = product(
            *(range(1 if name in varying else extent) for name, extent in zip(Coordinates._fields, self.shape))
        )
        return [self.group_of(self.rank_at(Coordinates(*leader)), kind) for leader in leaders]


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _alternatives(total: int) -> str:
    """`_alternatives(12)` is "1, 2, 3, 4, 6 or 12 do"."""
    divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
    return "1 does" if total == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]} do"


@dataclass(frozen=True)
class _ParallelState:
    layout: ParallelLayout
    rank: int
    groups: dict[str, dist.ProcessGroup]
    data_context_mesh: DeviceMesh


_state: _ParallelState | None = None


def initialize_model_parallel(layout: ParallelLayout, device_type: str = "cpu", timeout: timedelta | None = None) -> None:
    """Makes this process's group of every kind. Every rank of the job calls it, with the same layout.

    torch.distributed must be initialised; the groups use its backend. `device_type` ("cpu" or "cuda") is that of
    the mesh for FSDP; `timeout` is that of every group (None: torch's default).
    Each kind gets its own group even where two hold the same ranks: the weight gathers of FSDP must not queue
    behind the all-to-alls of a layer. NCCL makes a communicator at its first use, so an unused group is free.
    """
    global _state
    if _state is not None:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group before initialize_model_parallel")
    if layout.world_size != dist.get_world_size():
        raise ValueError(f"the layout is for {_ranks(layout.world_size)}, the job has {dist.get_world_size()}")
    rank = dist.get_rank()
    groups = {}
    for kind in VARYING_COORDINATES:
        # Every rank names every group, in the same order, so that the names agree; nobody waits for strangers.
        groups[kind], _ = dist.new_subgroups_by_enumeration(layout.groups(kind), timeout=timeout, group_desc=kind)
    mesh = DeviceMesh.from_group(groups["data_context"], device_type, mesh_dim_names=("data_context",))
    _state = _ParallelState(layout, rank, groups, mesh)


def destroy_model_parallel() -> None:
    """Destroys the groups; every rank calls it. Does nothing when there are none."""
    global _state
    if _state is None:
        return
    groups, _state = _state.groups, None
    for group in groups.values():
        dist.destroy_process_group(group)


def _current() -> _ParallelState:
    if _state is None:
        raise RuntimeError("there are no model parallel groups; call initialize_model_parallel first")
    return _state


def get_layout() -> ParallelLayout:
    return _current().layout


def get_context_parallel_group() -> dist.ProcessGroup:
    return _current().groups["context"]


def get_context_parallel_world_size() -> int:
    return get_context_parallel_group().size()


def get_context_parallel_rank() -> int:
    """`c`: this rank holds tokens [c*T, (c+1)*T) of its micro-batch's stream."""
    return get_context_parallel_group().rank()


def get_context_parallel_global_ranks() -> list[int]:
    state = _current()
    return state.layout.group_of(state.rank, "context")


def get_ulysses_group() -> dist.ProcessGroup:
    return _current().groups["ulysses"]


def get_ring_group() -> dist.ProcessGroup:
    return _current().groups["ring"]


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    return _current().groups["data_context" if with_context_parallel else "data"]


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return get_data_parallel_group(with_context_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return get_data_parallel_group(with_context_parallel).rank()


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return _current().groups["pipeline"]


def get_pipeline_model_parallel_world_size() -> int:
    return get_pipeline_model_parallel_group().size()


def get_pipeline_model_parallel_rank() -> int:
    return get_pipeline_model_parallel_group().rank()


def get_data_context_mesh() -> DeviceMesh:
    """The 1-D mesh over this stage's data x context ranks, for `fully_shard`."""
    return _current().data_context_mesh
