"""The predicted parts against bytes counted by hand."""

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.estimate import GIB, estimate_memory
from megacp.model.config import preset


def estimate(heads_per_stage=8, tokens=131072, **changes):
    settings = dict(sharding_ranks=8, itemsize=2, mlp_tile_size=8192, loss_tile_size=2048) | changes
    schedule = build_head_schedule(32, 8, 8, heads_per_stage)
    return estimate_memory(preset("llama3-8b"), schedule, tokens, **settings)


def test_a_million_tokens_of_llama3_8b_on_8_ranks():
    memory = estimate()  # u is 1 GiB: 131,072 tokens x 4,096 x 2 bytes
    assert memory.states == 16 * 8_030_261_248 // 8
    assert memory.kept_activations == 32 * (2 * GIB + 32 * 131072 * 4)
    weight_gradients = 4 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
    assert memory.backward_buffers == 3 * GIB + 8 * GIB // 4 + weight_gradients


def test_stage_buffers_shrink_with_the_heads_in_flight():
    ulysses, upipe = estimate(heads_per_stage=32), estimate(heads_per_stage=8)
    assert ulysses.backward_buffers - upipe.backward_buffers == 4 * GIB * 3 // 4  # q, o, do, dq; one KV head a rank in both


def test_nothing_but_states_depends_on_the_sharding():
    assert estimate(sharding_ranks=16).total == estimate().total - estimate().states // 2


def test_tiles_do_not_grow_with_the_sequence():
    assert estimate(tokens=131072).tiles == estimate(tokens=1 << 20).tiles
