"""Small decoders and packed streams on which context-parallel ranks are compared with the float64 reference.

The stream has S = 116 tokens: 29 a rank on four ranks, an odd prime, so that tiles of 7 divide nothing.
"""

from typing import NamedTuple

import torch

from megacp import parallel_state
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import build_head_schedule, legal_heads_per_stage
from megacp.kernels.attention import Documents
from megacp.kernels.rotary import RopeScaling, attention_factor, inverse_frequencies
from megacp.memory.policy import LayerPlan
from megacp.memory.store import ActivationStore, Geometry
from megacp.model.config import ModelConfig
from megacp.model.layer_context import LayerContext

STREAM = 116  # S, tokens
CONTEXT_SIZES = (1, 2, 4)
HEADS = ((8, 8), (8, 2), (12, 4), (4, 1))  # (H, K)

# What fp32 may differ from float64 by, as ||ours - reference|| / ||reference|| over a whole tensor. A rounding is 6e-8; a layer
# chains some ten sums of tens to hundreds of terms, which measures up to 1.6e-6, three layers up to 4e-6. A wrong head, position,
# document or tile moves a tensor by 1e-3 and more. The float64 runs leave no room for small mistakes: they measure 1e-14, and
# 2e-12 at position 5,000,000, where the last bit of a RoPE frequency is worth 1e-11 rad.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

# Of the three pairs of a head, D = 6, one is kept, one slowed by part and one slowed fully.
LLAMA3 = RopeScaling("llama3", 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 4096, beta_fast=8.0, beta_slow=1.0)


class Stream(NamedTuple):
    """Attention borders and the positions of a packed stream."""

    cu_seqlens: tuple[int, ...]
    position_ids_S: torch.Tensor


# Lengths 1, 1, 31, 1, 56, 25, 1: documents of one token, one that crosses the border between ranks 0 and 1 of four, and one that
# crosses the next two.
BORDERS = (0, 1, 2, 33, 34, 90, 115, STREAM)


def _positions_in_documents(borders):
    return torch.cat([torch.arange(stop - start) for start, stop in zip(borders, borders[1:])])


STREAMS = {
    "one document, far from position 0": Stream((0, STREAM), torch.arange(STREAM) + 5_000_000),
    "documents, positions reset": Stream(BORDERS, _positions_in_documents(BORDERS)),
    "documents, positions running on": Stream(BORDERS, torch.arange(STREAM)),
    "causal across documents, positions reset": Stream((0, STREAM), _positions_in_documents(BORDERS)),
}


def tiny_config(heads: int, kv_heads: int, **changes) -> ModelConfig:
    """A config in which no two widths agree: d = 24, F = 40, D = 6, V = 53."""
    fields = dict(
        name="parity", num_layers=3, hidden_size=24, ffn_hidden_size=40, num_attention_heads=heads, num_query_groups=kv_heads,
        kv_channels=6, vocab_size=53, max_position_embeddings=256, rotary_base=10000.0, rope_scaling=None, norm_epsilon=1e-5,
        qk_layernorm=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    return ModelConfig(**(fields | changes))


def shard(rank: int, world_size: int) -> slice:
    """The tokens of context rank `rank`."""
    return slice(rank * STREAM // world_size, (rank + 1) * STREAM // world_size)


def layer_context(
    config: ModelConfig, stream: Stream, heads_per_stage: int, tile_size: int, backend: str = "reference",
    dtype: torch.dtype = torch.float32, plan: LayerPlan = LayerPlan(), query_chunk: int | None = None,
    disk_directory: str | None = None,
) -> LayerContext:
    """What the layers are called with on this rank; the groups of `parallel_state` must exist."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, size, heads_per_stage)
    attention = AttentionSettings(
        schedule, parallel_state.get_ulysses_group(), Documents(stream.cu_seqlens), config.kv_channels**-0.5, backend, query_chunk
    )
    geometry = Geometry.of(config, schedule, STREAM // size, tile_size, dtype)
    return LayerContext(
        attention,
        position_ids_T=stream.position_ids_S[shard(rank, size)],
        inv_freq_D2=inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling),
        rotary_factor=attention_factor(config.rope_scaling),
        tile_size=tile_size,
        store=ActivationStore([plan] * config.num_layers, geometry, torch.device("cpu"), disk_directory),
    )


def legal_stages(heads: int, context_size: int) -> list[int]:
    """Every `U` for which the schedule exists."""
    return legal_heads_per_stage(heads, context_size)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||, in float64."""
    return ((ours.double() - reference).norm() / reference.norm()).item()
