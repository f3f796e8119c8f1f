"""A wrong group is a silent wrong model: ranks would sum the gradients, or exchange the heads, of strangers."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp import parallel_state
from megacp.parallel_state import Coordinates, ParallelLayout
from tests.distributed import run_distributed

KINDS = ("ulysses", "ring", "context", "data", "data_context", "pipeline")


def _pairs(*pairs):
    return [list(pair) for pair in pairs]


# Written by hand from the rank order ulysses, ring, data, pipeline (fastest first).
GOLDEN = {
    ParallelLayout(1): dict.fromkeys(KINDS, [[0]]),
    ParallelLayout(8, 4): dict(
        ulysses=[[0, 1, 2, 3], [4, 5, 6, 7]],
        ring=[[0], [1], [2], [3], [4], [5], [6], [7]],
        context=[[0, 1, 2, 3], [4, 5, 6, 7]],
        data=_pairs((0, 4), (1, 5), (2, 6), (3, 7)),
        data_context=[[0, 1, 2, 3, 4, 5, 6, 7]],
        pipeline=[[0], [1], [2], [3], [4], [5], [6], [7]],
    ),
    ParallelLayout(4, 4, ulysses_degree=1): dict(
        ulysses=[[0], [1], [2], [3]],
        ring=[[0, 1, 2, 3]],
        context=[[0, 1, 2, 3]],
        data=[[0], [1], [2], [3]],
        data_context=[[0, 1, 2, 3]],
        pipeline=[[0], [1], [2], [3]],
    ),
    ParallelLayout(16, 8, ulysses_degree=4): dict(
        ulysses=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        ring=_pairs((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)),
        context=[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        data=_pairs((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)),
        data_context=[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]],
        pipeline=[[rank] for rank in range(16)],
    ),
    ParallelLayout(16, 4, ulysses_degree=2, pipeline_model_parallel_size=2): dict(
        ulysses=_pairs((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)),
        ring=_pairs((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)),
        context=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        data=_pairs((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)),
        data_context=[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        pipeline=_pairs((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)),
    ),
}


@pytest.mark.parametrize("layout", GOLDEN, ids=str)
def test_groups_of_small_layouts(layout):
    assert {kind: layout.groups(kind) for kind in KINDS} == GOLDEN[layout]


def test_groups_on_1024_gpus():
    """128 nodes of 8: Ulysses inside a node, rings of 4 nodes, 4 pipeline stages of 256 ranks, 8 data replicas."""
    layout = ParallelLayout(1024, 32, ulysses_degree=8, pipeline_model_parallel_size=4)
    assert (layout.data_parallel_size, layout.ring_degree) == (8, 4)
    assert [len(layout.groups(kind)) for kind in KINDS] == [128, 256, 32, 128, 4, 256]
    assert all(group[0] % 8 == 0 and group == list(range(group[0], group[0] + 8)) for group in layout.groups("ulysses"))
    assert layout.groups("ring")[9] == [33, 41, 49, 57]
    assert layout.groups("context")[31] == list(range(992, 1024))
    assert layout.groups("data")[0] == [0, 32, 64, 96, 128, 160, 192, 224]
    assert layout.groups("data")[-1] == [799, 831, 863, 895, 927, 959, 991, 1023]
    assert layout.groups("data_context")[2] == list(range(512, 768))
    assert layout.groups("pipeline")[255] == [255, 511, 767, 1023]
    assert layout.coordinates(799) == Coordinates(pipeline=3, data=0, ring=3, ulysses=7)


degrees = st.sampled_from([1, 2, 3, 4, 5, 8, 16])


@given(ulysses=degrees, ring=degrees, data=degrees, pipeline=degrees)
@settings(max_examples=60, deadline=None)
def test_every_rank_is_in_exactly_one_group_of_each_kind(ulysses, ring, data, pipeline):
    while ulysses * ring * data * pipeline > 1024:
        ulysses, ring, data, pipeline = (max(1, n // 2) for n in (ulysses, ring, data, pipeline))
    world = ulysses * ring * data * pipeline
    layout = ParallelLayout(world, ulysses * ring, ulysses, pipeline)
    sizes = dict(ulysses=ulysses, ring=ring, context=ulysses * ring, data=data,
                 data_context=data * ulysses * ring, pipeline=pipeline)  # fmt: skip
    assert layout.data_parallel_size == data and layout.ring_degree == ring
    for kind in KINDS:
        groups = layout.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {sizes[kind]}
        assert len(groups) * sizes[kind] == world
        for group in groups[:: max(1, len(groups) // 8)]:
            assert group == sorted(group) and all(layout.group_of(rank, kind) == group for rank in group)
    for rank in range(0, world, max(1, world // 16)):
        assert layout.rank_at(layout.coordinates(rank)) == rank
        # Two groups of different kinds meet in this rank alone, unless one kind contains the other.
        meets = [set(layout.group_of(rank, kind)) for kind in ("ulysses", "ring", "data", "pipeline")]
        assert all(meets[i] & meets[j] == {rank} for i in range(4) for j in range(i))
        # A rank's index in its context group says which tokens it holds: whole Ulysses groups, one after the other.
        place = layout.coordinates(rank)
        assert layout.group_of(rank, "context").index(rank) == place.ring * ulysses + place.ulysses


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(world_size=8, context_parallel_size=3), r"--context-parallel-size 3 .* 8 ranks; 1, 2, 4 or 8 do"),
        (dict(world_size=1, context_parallel_size=2), r"--context-parallel-size 2 .* 1 rank; 1 does"),
        (dict(world_size=8, pipeline_model_parallel_size=5), r"--pipeline-model-parallel-size 5 .*1, 2, 4 or 8 do"),
        (dict(world_size=8, context_parallel_size=8, pipeline_model_parallel_size=2),
         r"--context-parallel-size 8 .*4 ranks of a pipeline stage \(--pipeline-model-parallel-size 2\); 1, 2 or 4 do"),
        (dict(world_size=12, context_parallel_size=6, ulysses_degree=4),
         r"Ulysses degree of 4 .*--context-parallel-size 6; 1, 2, 3 or 6 do"),
        (dict(world_size=8, context_parallel_size=0), r"--context-parallel-size is 0; it must be at least 1"),
        (dict(world_size=8, pipeline_model_parallel_size=-1), r"--pipeline-model-parallel-size is -1"),
    ],
)  # fmt: skip
def test_an_impossible_layout_names_the_flag_and_what_would_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**arguments)


def test_a_rank_outside_the_job_is_refused():
    with pytest.raises(ValueError, match="rank 8 is outside the job's ranks 0..7"):
        ParallelLayout(8).coordinates(8)


def test_getters_without_groups_say_what_to_call():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_context_parallel_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel_state.initialize_model_parallel(ParallelLayout(1))


def _make_groups(rank, world_size, layout):
    parallel_state.initialize_model_parallel(layout, "cpu", timeout=timedelta(seconds=60))
    assert parallel_state.get_layout() == layout
    getters = dict(
        ulysses=parallel_state.get_ulysses_group(),
        ring=parallel_state.get_ring_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
    )
    members = {}
    for kind, group in getters.items():
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(gathered, torch.tensor([rank]), group=group)
        members[kind] = [int(value) for value in gathered]
    places = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    assert parallel_state.get_context_parallel_global_ranks() == members["context"]
    mesh = parallel_state.get_data_context_mesh()
    assert mesh.ndim == 1 and mesh.mesh.tolist() == members["data_context"]
    assert mesh.get_local_rank() == places[3]
    with pytest.raises(RuntimeError, match="destroy_model_parallel"):
        parallel_state.initialize_model_parallel(layout)
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="call initialize_model_parallel first"):
        parallel_state.get_layout()
    with pytest.raises(ValueError, match=f"the job has {world_size}"):
        parallel_state.initialize_model_parallel(ParallelLayout(world_size + 1))
    parallel_state.initialize_model_parallel(layout)  # and again, after destroying
    assert parallel_state.get_context_parallel_rank() == places[2]
    return members, places, sizes


@pytest.mark.parametrize(
    "layout", [ParallelLayout(1), ParallelLayout(8, 4, 2), ParallelLayout(8, 2, pipeline_model_parallel_size=2)], ids=str
)
def test_the_groups_really_made_are_those_of_the_layout(layout):
    for rank, (members, places, sizes) in enumerate(run_distributed(_make_groups, layout.world_size, layout)):
        for kind in KINDS:
            assert members[kind] == next(group for group in layout.groups(kind) if rank in group), (rank, kind)
        pipeline, data, ring, ulysses = layout.coordinates(rank)
        context = ring * layout.ulysses_degree + ulysses
        assert places == (pipeline, data, context, data * layout.context_parallel_size + context)
        stage = layout.world_size // layout.pipeline_model_parallel_size
        assert sizes == (
            layout.pipeline_model_parallel_size, layout.data_parallel_size, layout.context_parallel_size, stage
        )  # fmt: skip
