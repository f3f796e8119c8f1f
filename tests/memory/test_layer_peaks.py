"""How much memory one decoder layer takes, counted in `u` (one [T, d] tensor), against the list of tensors that must be there.

The proportions are those of Llama3-8B on 8 ranks with U = 8: four stages, each with a quarter of the query heads, all sharing the
one pair of KV heads that came with the first; D = 64, and the attention is the stub with FlashAttention-4's memory. So in units of
u a stage's q, o, do, dq, k, v, dk and dv are 1/4 each and the kernel's fp32 sum of dq is 1/2. MLP width appears in tiles only and
is small.

Counted is what is alive above the weights, and in backward above the fp32 weight gradients, with the layer's input or the
gradient it is given. What the lists leave out is `REST`: the log-sum-exp (1/32 of u here), the kernel's fp32 rows, tiles.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacp import parallel_state
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents
from megacp.kernels.rotary import inverse_frequencies
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.memory.store import ActivationStore, Geometry
from megacp.model.decoder_layer import DecoderLayer
from megacp.model.layer_context import LayerContext
from megacp.parallel_state import ParallelLayout
from tests.model.cases import tiny_config

RANKS, TOKENS, TILE = 2, 4096, 128
CONFIG = tiny_config(8, 2, num_layers=1, hidden_size=512, ffn_hidden_size=64, kv_channels=64)
UNIT = TOKENS * CONFIG.hidden_size * 2  # bytes, bf16
REST = 0.2


class Peaks(NamedTuple):
    """In u. `kept`: between forward and backward, beside the output."""

    forward: float
    kept: float
    backward: float


@pytest.fixture(autouse=True)
def one_rank_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    parallel_state.initialize_model_parallel(ParallelLayout(RANKS, RANKS))
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class _Loss(torch.autograd.Function):
    """Keeps nothing of the layer's output, as the layer above would not, and gives it a gradient."""

    @staticmethod
    def forward(ctx, out_Td):
        return torch.zeros(())

    @staticmethod
    def backward(ctx, g):
        return torch.randn(TOKENS, CONFIG.hidden_size, dtype=torch.bfloat16)


def measure(plan: LayerPlan, query_chunk: int | None = None) -> Peaks:
    schedule = build_head_schedule(CONFIG.num_attention_heads, CONFIG.num_query_groups, RANKS, RANKS)
    documents = Documents((0, RANKS * TOKENS))
    attention = AttentionSettings(schedule, parallel_state.get_ulysses_group(), documents, 0.125, "stub-fa4", query_chunk)
    geometry = Geometry.of(CONFIG, schedule, TOKENS, TILE, torch.bfloat16)
    store = ActivationStore([plan], geometry, torch.device("cpu"))
    context = LayerContext(attention, torch.arange(TOKENS), inverse_frequencies(64, 1e4), 1.0, TILE, store)
    layer = DecoderLayer(CONFIG, 0, dtype=torch.bfloat16)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    weight_gradients = 4 * sum(weight.numel() for weight in layer.parameters())

    with AllocationCounter() as counter:
        h_Td = torch.randn(TOKENS, CONFIG.hidden_size, dtype=torch.bfloat16)
        counter.reset_peak()
        out_Td = layer(h_Td, context)
        forward = counter.peak_bytes()
        loss = _Loss.apply(out_Td)
        del h_Td, out_Td
        kept = counter.live_bytes()
        counter.reset_peak()
        loss.backward()
        backward = counter.peak_bytes() - weight_gradients
    return Peaks(forward / UNIT, kept / UNIT, backward / UNIT)


# The tensors alive at the largest moment, in u:
#   forward, O on the device    h 1, O of three stages .75, k v .5, q .25, o .25         (and the output 1 instead, when h stays)
#   forward, streamed           h 1, k v .5, q .25, o .25
#   backward, second stage      g 1, dxn 1, q k v o do 1.25, dq dk dv .75, sums of dk dv .5, kernel .5; h 1, O of two stages .5
#                               (lean: dxn in the memory of g)
CASES = {
    "gpu": (PLANS["gpu"], Peaks(3.0, 2.0, 6.5)),
    "h on the host": (LayerPlan(h=HOST), Peaks(2.75, 1.0, 5.5)),
    "host": (PLANS["host"], Peaks(2.0, 0.0, 5.0)),
    "lean": (PLANS["lean"], Peaks(2.0, 0.0, 4.0)),
    "full": (LayerPlan(h=HOST, output=RECOMPUTE, lse=RECOMPUTE), Peaks(2.75, 0.0, 5.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_takes_no_more_than_its_list_of_tensors(name):
    plan, most = CASES[name]
    peaks = measure(plan)
    print(f"{name}: {peaks}")
    assert peaks.kept <= most.kept + 0.05, "something outlives the forward"
    assert peaks.forward <= most.forward + REST
    assert peaks.backward <= most.backward + REST


def test_query_chunks_shrink_the_lean_backward():
    """Eight chunks: q, o, do, dq and the kernel's sum are an eighth of a stage's; dk and dv are summed in fp32."""
    whole, chunked = measure(PLANS["lean"]), measure(PLANS["lean"], TOKENS // 8)
    print(f"lean in chunks: {chunked}")
    assert chunked.forward <= whole.forward and chunked.backward <= whole.backward - 0.4
