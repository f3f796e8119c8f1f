"""Exchanges that are late, and stages sent ahead: the same bits of loss and gradients, whenever what was sent arrives."""

import random
import time
from dataclasses import replace

import pytest
import torch

from megacp.context_parallel import engine
from megacp.memory.policy import GPU, HOST, RECOMPUTE, LayerPlan
from megacp.model.decoder_layer import DecoderLayer
from megacp.parallel_state import ParallelLayout, initialize_model_parallel
from tests.distributed import run_distributed
from tests.model.cases import STREAMS, layer_context, shard, tiny_config

TILE = 7
PLANS = {
    "gpu": LayerPlan(),
    "nothing recomputed": LayerPlan(products=True),
    "host": LayerPlan(HOST, HOST, HOST),
    "lean": LayerPlan(HOST, HOST, HOST, HOST),
    "recompute": LayerPlan(HOST, RECOMPUTE, RECOMPUTE),
    "gpu, h on the host": LayerPlan(HOST, GPU, GPU),
}


class LateExchange:
    """Begins only when it is waited for, and takes its time; until then what arrives holds no number.

    Reading early gives NaN, and overwriting early what is sent gives others something else.
    """

    def __init__(self, send_C, group, original, pause):
        self.received_C = torch.full_like(send_C, torch.nan)
        self.send_C, self.group, self.original, self.pause = send_C, group, original, pause

    def wait(self):
        if self.send_C is not None:
            time.sleep(self.pause)
            self.received_C.copy_(self.original(self.send_C, self.group).wait())
            self.send_C = None
        return self.received_C


def gradients(heads, kv_heads, heads_per_stage, query_chunk, plan):
    """Output and all gradients of a layer on this rank."""
    config, stream = tiny_config(heads, kv_heads, qk_layernorm=True), STREAMS["documents, positions reset"]
    torch.manual_seed(1)
    layer = DecoderLayer(replace(config, num_layers=1), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    context = layer_context(config, stream, heads_per_stage, TILE, plan=plan, query_chunk=query_chunk)
    torch.manual_seed(2)
    size = context.attention.schedule.ulysses_degree
    rows = shard(torch.distributed.get_rank() % size, size)
    h_Sd, g_Sd = (torch.randn(len(stream.position_ids_S), config.hidden_size) for _ in range(2))
    h_Td = h_Sd[rows].clone().requires_grad_()
    out_Td = layer(h_Td.clone(), context)
    result = {"out": out_Td.detach().clone()}
    out_Td.backward(g_Sd[rows].clone())
    return result | {"h": h_Td.grad} | {name: weight.grad for name, weight in layer.named_parameters()}


def differing(rank, world_size, heads, kv_heads, heads_per_stage, query_chunk):
    """Names of the results that change with prefetching or with late exchanges, by plan and kind of lateness."""
    initialize_model_parallel(ParallelLayout(world_size, world_size))
    original, lottery, wrong = engine.all_to_all, random.Random(5), []
    kinds = {
        "in time": original,
        "as late as can be": lambda send, group: LateExchange(send, group, original, 0.0),
        "any time": lambda send, group: LateExchange(send, group, original, lottery.random() / 100),
    }
    for name, plan in PLANS.items():
        expected = gradients(heads, kv_heads, heads_per_stage, query_chunk, plan)
        assert all(value.isfinite().all() for value in expected.values())
        for kind, exchange in kinds.items():
            engine.all_to_all = exchange
            try:
                ours = gradients(heads, kv_heads, heads_per_stage, query_chunk, replace(plan, prefetch=True))
            finally:
                engine.all_to_all = original
            wrong += [(name, kind, tensor) for tensor, value in ours.items() if not torch.equal(value, expected[tensor])]
    return wrong


@pytest.mark.parametrize(
    "world_size, heads, kv_heads, heads_per_stage, query_chunk",
    [(2, 8, 2, 2, None), (2, 12, 4, 4, 2 * TILE), (2, 4, 1, 4, None), (1, 8, 2, 2, 3 * TILE)],
)
def test_prefetching_and_late_exchanges_change_no_bit(world_size, heads, kv_heads, heads_per_stage, query_chunk):
    assert run_distributed(differing, world_size, heads, kv_heads, heads_per_stage, query_chunk) == [[]] * world_size


class WatchedExchange:
    """Notes when it begins and when it is first waited for."""

    def __init__(self, exchange, name, events):
        self.exchange, self.name, self.events = exchange, name, events
        events.append(f"send {name}")

    def wait(self):
        if f"await {self.name}" not in self.events:
            self.events.append(f"await {self.name}")
        return self.exchange.wait()


def order(rank, world_size, prefetch):
    """What a forward of two stages does, in order."""
    initialize_model_parallel(ParallelLayout(world_size, world_size))
    events, names = [], iter(["k", "v", "q0", "q1", "o0", "o1"] if prefetch else ["k", "v", "q0", "o0", "q1", "o1"])
    all_to_all, forward = engine.all_to_all, engine.attention_forward

    def attention(*arguments):
        events.append("attention")
        return forward(*arguments)

    engine.all_to_all = lambda send, group: WatchedExchange(all_to_all(send, group), next(names), events)
    engine.attention_forward = attention
    try:
        config, stream = tiny_config(8, 2), STREAMS["documents, positions reset"]
        layer = DecoderLayer(replace(config, num_layers=1), 0)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        context = layer_context(config, stream, 4, TILE, plan=LayerPlan(prefetch=prefetch))
        with torch.no_grad():
            layer(torch.zeros(len(stream.position_ids_S) // world_size, config.hidden_size), context)
    finally:
        engine.all_to_all, engine.attention_forward = all_to_all, forward
    return events


def test_the_next_stage_is_on_its_way_during_attention():
    turns = "send k, await k, send v, await v, send q0, await q0, attention, send o0, await o0, send q1, await q1, attention, send o1, await o1"
    ahead = "send k, send v, send q0, send q1, await k, await v, await q0, attention, send o0, await o0, await q1, attention, send o1, await o1"
    assert run_distributed(order, 2, False) == [turns.split(", ")] * 2
    assert run_distributed(order, 2, True) == [ahead.split(", ")] * 2
