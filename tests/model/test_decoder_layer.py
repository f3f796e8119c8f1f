"""The hand-written layer on 1, 2 and 4 ranks against plain autograd in float64: output, input gradient, every weight gradient.

For every (H, K), every legal U, streams of documents, with and without q/k norms and RoPE scaling, tiles that do not divide T.
"""

import pytest
import torch

from megacp import parallel_state
from megacp.model.decoder_layer import DecoderLayer
from megacp.parallel_state import ParallelLayout
from tests.distributed import run_distributed
from tests.model.cases import (
    CONTEXT_SIZES, HEADS, LLAMA3, STREAM, STREAMS, TOLERANCE, YARN, layer_context, legal_stages, relative_error, shard, tiny_config,
)  # fmt: skip
from tests.reference import random_parameters, reference_layer

WHOLE = 1000  # a tile of more tokens than there are


def _configs(heads, kv_heads):
    """Llama and Qwen3 in turn, plain and with RoPE scaling: two neighbours are always one of each."""
    qwen = dict(qk_layernorm=True, norm_epsilon=1e-6)
    variants = [dict(), qwen, dict(rope_scaling=LLAMA3), dict(**qwen, rope_scaling=YARN)]
    return [tiny_config(heads, kv_heads, **variant) for variant in variants]


def _layer_parameters(config):
    params = random_parameters(config, std=0.2, seed=11)
    return {name.removeprefix("layers.0."): value for name, value in params.items() if name.startswith("layers.0.")}


def _hidden_and_gradient():
    generator = torch.Generator().manual_seed(13)
    return torch.randn(2, STREAM, 24, dtype=torch.float64, generator=generator).unbind(0)


def _reference(config, stream):
    params = {name: value.requires_grad_() for name, value in _layer_parameters(config).items()}
    h_Sd, g_Sd = _hidden_and_gradient()
    h_Sd = h_Sd.clone().requires_grad_()
    out_Sd = reference_layer(params, h_Sd, stream.position_ids_S, stream.cu_seqlens, config)
    out_Sd.backward(g_Sd)
    return {"output": out_Sd.detach(), "input": h_Sd.grad} | {name: value.grad for name, value in params.items()}


def _run_layer(config, stream, heads_per_stage, tile_size, dtype, backend, query_chunk=None):
    """Output, input gradient and weight gradients of this rank."""
    mine = shard(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())
    layer = DecoderLayer(config, 0, dtype=dtype)
    layer.load_state_dict(_layer_parameters(config))
    h_Sd, g_Sd = _hidden_and_gradient()
    h_Td = h_Sd[mine].to(dtype).requires_grad_()
    out_Td = layer(h_Td, layer_context(config, stream, heads_per_stage, tile_size, backend, dtype, query_chunk=query_chunk))
    out_Td.backward(g_Sd[mine].to(dtype))
    gradients = {name: value.grad for name, value in layer.named_parameters()}
    return {"output": out_Td.detach(), "input": h_Td.grad} | gradients


def _run_cases(rank, world_size, cases):
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    return [_run_layer(*case) for case in cases]


def _assert_parity(world_size, cases):
    """Runs the cases in one group of ranks; tokens are laid end to end, weight gradients summed over the ranks."""
    references = {}
    by_rank = run_distributed(_run_cases, world_size, cases)
    for case, *ranks in zip(cases, *by_rank):
        config, stream, heads_per_stage, tile_size, dtype, *_ = case
        key = (config, stream.cu_seqlens, tuple(stream.position_ids_S.tolist()))
        if key not in references:
            references[key] = _reference(config, stream)
        for name, expected in references[key].items():
            parts = [values[name] for values in ranks]
            assert all(part.dtype == dtype for part in parts)
            ours = torch.cat(parts) if name in ("output", "input") else sum(part.double() for part in parts)
            error = relative_error(ours, expected)
            assert error < TOLERANCE[dtype], (
                f"{name}: {error:.1e} on {world_size} ranks, U={heads_per_stage}, tile {tile_size}, {dtype}, {config}, "
                f"{stream.cu_seqlens}"
            )


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("world_size", CONTEXT_SIZES)
def test_layer_matches_the_reference(world_size, heads, kv_heads):
    cases = []
    for number, heads_per_stage in enumerate(legal_stages(heads, world_size)):
        for place, stream in enumerate(STREAMS.values()):
            for step, dtype in enumerate((torch.float32, torch.float64)):
                for variant in range(2):
                    config = _configs(heads, kv_heads)[(number + place + variant) % 4]
                    cases.append((config, stream, heads_per_stage, (7, WHOLE)[step * number % 2], dtype, "reference"))
    _assert_parity(world_size, cases)


@pytest.mark.parametrize("world_size", [1, 4])
def test_layer_matches_the_reference_with_the_fast_attention_of_the_cpu(world_size):
    config = tiny_config(8, 2, qk_layernorm=True)
    _assert_parity(world_size, [(config, stream, 4, WHOLE, torch.float32, "torch") for stream in STREAMS.values()])


@pytest.mark.parametrize("tile_size", [1, 28, 29, 30])
def test_any_tile_size_serves(tile_size):
    """One token, one less than T = 29, T, one more."""
    config = tiny_config(4, 1, qk_layernorm=True)
    stream = STREAMS["documents, positions reset"]
    _assert_parity(4, [(config, stream, 4, tile_size, torch.float32, "reference")])


@pytest.mark.parametrize("world_size", CONTEXT_SIZES)
def test_query_chunks_match_the_reference(world_size):
    """Chunks of one tile, of several, of all but the last few tokens; stages whose queries share KV heads evenly and not."""
    cases = [
        (tiny_config(heads, kv_heads, qk_layernorm=True), stream, heads_per_stage, 7, dtype, "reference", query_chunk)
        for (heads, kv_heads), heads_per_stage in (((12, 4), 4), ((8, 2), 8), ((4, 1), 4))
        for stream in STREAMS.values()
        for query_chunk, dtype in ((7, torch.float32), (14, torch.float64), (28, torch.float32))
    ]
    _assert_parity(world_size, cases)


def test_a_second_backward_is_refused():
    with pytest.raises(AssertionError, match="a decoder layer runs backward once per forward"):
        run_distributed(_backward_twice, 1)


def _backward_twice(rank, world_size):
    parallel_state.initialize_model_parallel(ParallelLayout(1))
    config, stream = tiny_config(4, 1), STREAMS["documents, positions reset"]
    layer = DecoderLayer(config, 0)
    layer.load_state_dict(_layer_parameters(config))
    out_Td = layer(_hidden_and_gradient()[0].float(), layer_context(config, stream, 4, WHOLE))
    out_Td.sum().backward(retain_graph=True)
    out_Td.sum().backward()
