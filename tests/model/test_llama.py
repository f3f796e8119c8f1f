"""Three layers, embedding and output head on 1, 2 and 4 ranks against plain autograd in float64: loss and every weight gradient."""

import pytest
import torch

from megacp import parallel_state
from megacp.model.llama import Llama
from megacp.parallel_state import ParallelLayout
from tests.distributed import run_distributed
from tests.model.cases import (
    CONTEXT_SIZES, HEADS, LLAMA3, STREAM, STREAMS, TOLERANCE, YARN, layer_context, legal_stages, relative_error, shard, tiny_config,
)  # fmt: skip
from tests.reference import IGNORED_LABEL, random_parameters, reference_model

STD = 0.15  # of the weights; at the usual 0.02 attention is so even that a wrong position barely shows
MLP_TILE, LOSS_TILE = 11, 13  # tokens; they divide no T


def _tokens_and_labels(config):
    """Masked labels are spread unevenly: all of the first 29 tokens (the whole of rank 0 of four), every third of the rest."""
    generator = torch.Generator().manual_seed(17)
    tokens_S, labels_S = torch.randint(config.vocab_size, (2, STREAM), generator=generator).unbind(0)
    labels_S[: STREAM // 4] = IGNORED_LABEL
    labels_S[::3] = IGNORED_LABEL
    return tokens_S, labels_S


def _reference(config, stream):
    params = {name: value.requires_grad_() for name, value in random_parameters(config, STD, seed=19).items()}
    tokens_S, labels_S = _tokens_and_labels(config)
    loss_sum, _ = reference_model(params, tokens_S, labels_S, stream.position_ids_S, stream.cu_seqlens, config)
    loss = loss_sum / (labels_S != IGNORED_LABEL).sum()
    loss.backward()
    return {"loss": loss.detach()} | {name: value.grad for name, value in params.items()}


def _run_model(config, stream, heads_per_stage, dtype):
    """This rank's share of the mean loss and of every weight gradient."""
    mine = shard(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())
    model = Llama(config, dtype=dtype)
    model.load_state_dict(random_parameters(config, STD, seed=19))
    tokens_S, labels_S = _tokens_and_labels(config)
    grad_scale = 1.0 / int((labels_S != IGNORED_LABEL).sum())
    context = layer_context(config, stream, heads_per_stage, MLP_TILE, dtype=dtype)
    loss = model(tokens_S[mine], labels_S[mine], context, grad_scale, LOSS_TILE)
    loss.backward()
    assert loss.dtype == dtype
    with torch.no_grad():
        assert torch.equal(model(tokens_S[mine], labels_S[mine], context, grad_scale, LOSS_TILE), loss), "loss without gradients"
    return {"loss": loss.detach()} | {name: value.grad for name, value in model.named_parameters()}


def _run_cases(rank, world_size, cases):
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    return [_run_model(*case) for case in cases]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("world_size", CONTEXT_SIZES)
def test_model_matches_the_reference(world_size, heads, kv_heads):
    variants = [
        dict(),
        dict(untie_embeddings_and_output_weights=False, rope_scaling=LLAMA3),
        dict(qk_layernorm=True, norm_epsilon=1e-6, rope_scaling=YARN),
        dict(qk_layernorm=True, untie_embeddings_and_output_weights=False),
    ]
    stages = legal_stages(heads, world_size)
    cases = []
    for number, (variant, stream) in enumerate(zip(variants, STREAMS.values())):
        config = tiny_config(heads, kv_heads, **variant)
        for dtype in (torch.float32, torch.float64):
            cases.append((config, stream, stages[number % len(stages)], dtype))
    by_rank = run_distributed(_run_cases, world_size, cases)
    for case, *ranks in zip(cases, *by_rank):
        config, stream, heads_per_stage, dtype = case
        expected = _reference(config, stream)
        assert ranks[0].keys() == expected.keys()
        for name, value in expected.items():
            error = relative_error(sum(share[name].double() for share in ranks), value)
            assert error < TOLERANCE[dtype], f"{name}: {error:.1e}, U={heads_per_stage}, {dtype}, {config}, {stream.cu_seqlens}"


def _all_masked(rank, world_size):
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    config = tiny_config(8, 2)
    model = Llama(config)
    model.load_state_dict(random_parameters(config, STD, seed=19))
    tokens_S, labels_S = _tokens_and_labels(config)
    mine = shard(rank, world_size)
    context = layer_context(config, STREAMS["documents, positions reset"], 8, MLP_TILE)
    loss = model(tokens_S[mine], torch.full_like(labels_S[mine], IGNORED_LABEL), context, 1.0, LOSS_TILE)
    loss.backward()
    return loss.item(), {name: value.grad.abs().max().item() for name, value in model.named_parameters()}


def test_a_batch_of_masked_tokens_gives_zeros():
    """Not NaN, which 0 / 0 labels would be."""
    for loss, largest in run_distributed(_all_masked, 2):
        assert loss == 0 and set(largest.values()) == {0.0}
