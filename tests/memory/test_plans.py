"""Where activations live changes no number: loss and every gradient are equal bit by bit under every plan, on 1 and 2 ranks."""

import itertools
import os
import random
import tempfile
import time

import pytest
import torch

from megacp import parallel_state
from megacp.memory import disk_region
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import DISK, GPU, HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.model.llama import Llama
from megacp.parallel_state import ParallelLayout
from tests.distributed import run_distributed
from tests.model.cases import STREAM, STREAMS, layer_context, shard, tiny_config
from tests.reference import random_parameters

TILE = 11  # divides no number of tokens here
HOST_PLANS = [
    LayerPlan(h, output, output if output == RECOMPUTE else lse, residual_grad)
    for h, output, lse, residual_grad in itertools.product((GPU, HOST), (GPU, HOST, RECOMPUTE), (GPU, HOST), (GPU, HOST))
    if output != RECOMPUTE or lse == GPU
] + [LayerPlan(products=True), LayerPlan(products=True, prefetch=True)]
DISK_PLANS = [
    LayerPlan(h=DISK),
    LayerPlan(output=DISK, residual_grad=HOST),
    LayerPlan(h=DISK, output=DISK, lse=HOST),
    LayerPlan(h=HOST, output=DISK, lse=HOST),
    LayerPlan(h=DISK, output=RECOMPUTE, lse=RECOMPUTE, residual_grad=HOST),
]


def _gradients(config, heads_per_stage, query_chunk, plan, micro_batches):
    """Losses and gradients of a model that sees `micro_batches` streams, one after the other, over one store."""
    mine = shard(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())
    model = Llama(config)
    model.load_state_dict(random_parameters(config, 0.2, seed=3))
    context = layer_context(
        config, STREAMS["documents, positions reset"], heads_per_stage, TILE, plan=plan, query_chunk=query_chunk,
        disk_directory=tempfile.gettempdir(),
    )  # fmt: skip
    losses = []
    for number in range(micro_batches):
        generator = torch.Generator().manual_seed(number)
        tokens_S, labels_S = torch.randint(config.vocab_size, (2, STREAM), generator=generator).unbind(0)
        loss = model(tokens_S[mine], labels_S[mine], context, 1 / STREAM, 13)
        loss.backward()
        losses.append(loss.detach())
    return losses + [parameter.grad for parameter in model.parameters()]


def _all_equal(rank, world_size, heads, kv_heads, heads_per_stage, query_chunk, plans):
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    config = tiny_config(heads, kv_heads, qk_layernorm=True)
    expected = _gradients(config, heads_per_stage, query_chunk, LayerPlan(), micro_batches=2)
    for plan in plans:
        ours = _gradients(config, heads_per_stage, query_chunk, plan, micro_batches=2)
        unequal = [number for number, (a, b) in enumerate(zip(ours, expected)) if not torch.equal(a, b)]
        assert not unequal, (plan, unequal)
    return len(plans)


@pytest.mark.parametrize(
    "world_size, heads, kv_heads, heads_per_stage, query_chunk, plans",
    [
        (1, 8, 2, 4, None, HOST_PLANS),
        (2, 12, 4, 4, None, HOST_PLANS[::3] + HOST_PLANS[-2:]),
        (2, 4, 1, 4, 2 * TILE, HOST_PLANS[2::5] + HOST_PLANS[-2:]),
        (1, 8, 2, 4, 3 * TILE, HOST_PLANS[1::3]),
    ],
)
def test_every_plan_gives_the_same_bits(world_size, heads, kv_heads, heads_per_stage, query_chunk, plans):
    arguments = heads, kv_heads, heads_per_stage, query_chunk, plans
    assert run_distributed(_all_equal, world_size, *arguments) == [len(plans)] * world_size


def _all_equal_on_a_slow_disk(*arguments):
    """Every step in the background takes up to 4 ms, some much less than the next: any order that is possible happens."""

    def slow(function):
        def call(*args):
            time.sleep(random.choice((0, 0, 0.001, 0.004)))
            return function(*args)

        return call

    os.pwrite, os.preadv, disk_region._copy = slow(os.pwrite), slow(os.preadv), slow(disk_region._copy)
    return _all_equal(*arguments)


@pytest.mark.parametrize(
    "world_size, heads, kv_heads, heads_per_stage, query_chunk, plans",
    [
        (1, 8, 2, 4, None, DISK_PLANS),
        (2, 12, 4, 4, None, DISK_PLANS[2:3]),
        (2, 4, 1, 4, 2 * TILE, DISK_PLANS[1:3]),
    ],
)
def test_plans_with_a_slow_disk_give_the_same_bits(world_size, heads, kv_heads, heads_per_stage, query_chunk, plans):
    arguments = heads, kv_heads, heads_per_stage, query_chunk, plans
    assert run_distributed(_all_equal_on_a_slow_disk, world_size, *arguments) == [len(plans)] * world_size


def _forward_twice(rank, world_size):
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    config = tiny_config(8, 2, num_layers=1)
    model = Llama(config)
    model.load_state_dict(random_parameters(config, 0.2, seed=3))
    context = layer_context(config, STREAMS["documents, positions reset"], 2, TILE, plan=LayerPlan(h=HOST))
    tokens_S = torch.arange(STREAM) % config.vocab_size
    first = model(tokens_S, tokens_S, context, 1.0, 13)
    model(tokens_S.flip(0), tokens_S, context, 1.0, 13)
    first.backward()


def test_a_second_forward_before_the_backward_is_refused():
    with pytest.raises(AssertionError, match="layer 0 ran forward again before its backward"):
        run_distributed(_forward_twice, 1)


def test_places_that_a_tensor_cannot_have_are_refused():
    with pytest.raises(ValueError, match="lse cannot live on disk; gpu, host, recompute can"):
        LayerPlan(lse=DISK)
    with pytest.raises(ValueError, match="recomputed together"):
        LayerPlan(output=RECOMPUTE)


def _bytes_held_after_forward(rank, world_size, plan):
    """Bytes that three layers keep alive between forward and backward, their own output aside when it is new."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    config = tiny_config(8, 2)
    model = Llama(config)
    model.load_state_dict(random_parameters(config, 0.2, seed=3))
    context = layer_context(config, STREAMS["documents, positions reset"], 2, TILE, plan=plan)
    h_Td = model.embedding(torch.arange(STREAM) % config.vocab_size)
    with AllocationCounter() as counter:
        for layer in model.layers:
            h_Td = layer(h_Td, context)
        return counter.live_bytes()


def test_between_forward_and_backward_only_what_the_plan_keeps_is_on_the_device():
    """No staging buffer, no stage that was on its way out: 32 layers would multiply it."""
    config, unit = tiny_config(8, 2), STREAM * 24 * 4
    output, lse = STREAM * 8 * config.kv_channels * 4, STREAM * 8 * 4
    (nothing,) = run_distributed(_bytes_held_after_forward, 1, PLANS["host"])
    (input_kept,) = run_distributed(_bytes_held_after_forward, 1, LayerPlan(output=HOST, lse=HOST))
    (all_kept,) = run_distributed(_bytes_held_after_forward, 1, LayerPlan())
    assert nothing == 0  # the output is in the place of the input
    assert input_kept == 3 * unit  # each layer's output is the next one's input, kept
    assert all_kept == 3 * (unit + output + lse)
