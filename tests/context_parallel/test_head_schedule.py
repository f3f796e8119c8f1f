"""The head schedule: every head once, with its own KV head, and no KV head sent twice."""

import doctest

import pytest
from hypothesis import given, settings, strategies as st

from megacp.context_parallel import head_schedule
from megacp.context_parallel.head_schedule import build_head_schedule, legal_heads_per_stage, legal_ulysses_degrees


@st.composite
def schedules(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 10]))
    num_heads = num_kv_heads * draw(st.integers(1, 8))
    ulysses_degree = draw(st.sampled_from(legal_ulysses_degrees(num_heads, num_kv_heads)))
    heads_per_stage = draw(st.sampled_from(legal_heads_per_stage(num_heads, ulysses_degree)))
    return build_head_schedule(num_heads, num_kv_heads, ulysses_degree, heads_per_stage)


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_query_head_once_with_its_own_kv_head(schedule):
    group = schedule.num_heads // schedule.num_kv_heads
    seen = []
    for rank in range(schedule.ulysses_degree):
        held = {}  # stage of arrival -> KV heads in order, as the rank holds them
        for stage in schedule.stages:
            new = list(schedule.new_kv_heads(stage, rank))
            if new:
                held[stage.index] = new
            queries = list(schedule.query_heads(stage, rank))
            seen += queries
            computed = []
            for run in stage.runs:
                assert run.q_count % run.kv_count == 0
                for i in range(run.q_count):
                    kv = held[run.arrival][run.kv_start + i // (run.q_count // run.kv_count)]
                    assert kv == queries[run.q_start + i] // group
                computed += queries[run.q_start : run.q_start + run.q_count]
            assert computed == queries
            for arrival in stage.releases:
                del held[arrival]
        assert not held, "every KV head is released"
    assert sorted(seen) == list(range(schedule.num_heads))


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_no_kv_head_is_sent_twice_to_a_rank_and_none_is_forgotten(schedule):
    group = schedule.num_heads // schedule.num_kv_heads
    for rank in range(schedule.ulysses_degree):
        received = [kv for stage in schedule.stages for kv in schedule.new_kv_heads(stage, rank)]
        needed = {q // group for stage in schedule.stages for q in schedule.query_heads(stage, rank)}
        assert len(received) == len(set(received))
        assert set(received) == needed


def test_all_heads_in_one_stage_is_ulysses():
    schedule = build_head_schedule(32, 8, 8, 32)
    (stage,) = schedule.stages
    assert [list(schedule.query_heads(stage, r)) for r in range(8)] == [list(range(4 * r, 4 * r + 4)) for r in range(8)]
    assert [list(schedule.new_kv_heads(stage, r)) for r in range(8)] == [[r] for r in range(8)]
    assert len(stage.runs) == 1 and stage.releases == (0,)


def test_llama3_8b_on_8_ranks_sends_each_kv_head_in_the_first_of_four_stages():
    schedule = build_head_schedule(32, 8, 8, 8)
    assert [stage.num_new_kv for stage in schedule.stages] == [1, 0, 0, 0]
    assert [list(schedule.query_heads(stage, 3)) for stage in schedule.stages] == [[12], [13], [14], [15]]
    assert [stage.releases for stage in schedule.stages] == [(), (), (), (0,)]


def test_fewer_kv_heads_than_ranks_sends_one_head_to_several():
    schedule = build_head_schedule(16, 2, 8, 8)
    assert schedule.kv_copies == 4
    assert [list(schedule.new_kv_heads(schedule.stages[0], r)) for r in range(8)] == [[0]] * 4 + [[1]] * 4


@pytest.mark.parametrize(
    "numbers, flag, works",
    [
        ((32, 8, 12, 12), "--context-parallel-size 12", "1 or 2 or 4 or 8 or 16 or 32"),
        ((32, 5, 1, 1), "--num-query-groups 5", "4 does"),
        ((32, 8, 8, 12), "--upipe-heads-per-stage 12", "8 or 16 or 32"),
        ((12, 4, 3, 3), "--context-parallel-size 3", "1 or 2 or 4 or 12"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_ones_that_do(numbers, flag, works):
    with pytest.raises(ValueError, match=flag) as error:
        build_head_schedule(*numbers)
    assert works in str(error.value)


def test_docstring_example():
    assert doctest.testmod(head_schedule).failed == 0
