"""What FSDP2 is told: gradients reach the reduction as they were summed."""

import pytest
import torch

from megacp import parallel_state
from megacp.parallel_state import ParallelLayout
from megacp.training.sharding import allocate_weights, build_model
from tests.distributed import run_distributed
from tests.model.cases import STREAM, STREAMS, layer_context, tiny_config


def _rounded_share(rank, world_size, tied):
    """Of every gradient: its dtype, and the share of its elements that bf16 holds exactly."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    config = tiny_config(4, 2, kv_channels=8, qk_layernorm=True, untie_embeddings_and_output_weights=not tied)
    model = build_model(config, parallel_state.get_data_context_mesh(), torch.bfloat16)
    allocate_weights(model, torch.device("cpu"), seed=1)
    tokens_S = torch.randint(config.vocab_size, (STREAM,), generator=torch.Generator().manual_seed(2))
    context = layer_context(config, STREAMS["documents, positions reset"], 4, 29, dtype=torch.bfloat16)
    for _ in range(2):  # the second adds to the first
        model(tokens_S, tokens_S, context, 1 / STREAM, 29).backward()
    shares = {}
    for name, weight in model.named_parameters():
        grad = weight.grad.to_local()
        shares[name] = grad.dtype, (grad == grad.bfloat16().float()).double().mean().item()
    return shares


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_not_rounded_before_the_reduction(tied):
    (shares,) = run_distributed(_rounded_share, 1, tied)
    for name, (dtype, rounded) in shares.items():
        assert dtype == torch.float32
        if name.startswith("layers.") or not tied and name.startswith("output_head."):
            assert rounded < 0.2, f"{name}: {rounded}"  # one in 2^16 by chance; a gradient of 0 is exact too
