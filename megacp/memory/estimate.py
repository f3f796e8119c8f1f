"""Predicted memory of one rank, in named parts, from numbers alone.

Worked example, Llama3-8B, 8 ranks of one context group, a sequence of 131,072 tokens, U = 8, bf16 (GiB):

    weights, gradients, optimizer state   14.96   16 bytes a parameter over 8 ranks
    gathered weights                       2.77   two layers, embedding and output head in bf16
    kept activations                       8.06   per layer h (1 u), attention output (1 u), log-sum-exp; u = 0.125
    backward buffers                       1.44   g, dO, dxn, and one stage's q k v o do dq dk dv; weight gradients in fp32
    tile of the MLP, or of the logits       2.45  the larger; logits with their weight gradient in fp32

The parts are those alive at the peak, the first layer's backward. The allocator's margin and the attention kernel's own
workspace are not in it.
"""

from dataclasses import dataclass

from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.model.config import ModelConfig

GIB = 2**30
BYTES_PER_PARAMETER = 4 + 4 + 8  # fp32 master weight, gradient, AdamW's two moments; sharded


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    states: int
    gathered_weights: int
    kept_activations: int
    backward_buffers: int
    tiles: int

    @property
    def total(self) -> int:
        return self.states + self.gathered_weights + self.kept_activations + self.backward_buffers + self.tiles


def estimate_memory(
    config: ModelConfig,
    schedule: HeadSchedule,
    tokens_per_rank: int,
    sharding_ranks: int,
    itemsize: int,
    mlp_tile_size: int,
    loss_tile_size: int,
) -> MemoryEstimate:
    """Memory of one rank that holds `tokens_per_rank` tokens; `itemsize` is that of the compute dtype in bytes."""
    unit = tokens_per_rank * config.hidden_size * itemsize  # u: one [T, d]
    attention_unit = tokens_per_rank * config.num_attention_heads * config.kv_channels * itemsize  # u where H·D = d
    log_sum_exp = 4 * tokens_per_rank * config.num_attention_heads
    stage_queries = attention_unit * schedule.heads_per_stage // schedule.num_heads
    most_kv = max(stage.num_new_kv for stage in schedule.stages)
    stage_kv = tokens_per_rank * schedule.ulysses_degree * most_kv * config.kv_channels * itemsize
    layer = config.layer_parameters()
    ends = config.vocab_size * config.hidden_size * (2 if config.untie_embeddings_and_output_weights else 1)
    mlp_tile = min(mlp_tile_size, tokens_per_rank) * config.ffn_hidden_size * (5 * itemsize + 3 * 4)
    loss_tile = min(loss_tile_size, tokens_per_rank) * config.vocab_size * itemsize
    return MemoryEstimate(
        states=BYTES_PER_PARAMETER * config.parameter_count() // sharding_ranks,
        gathered_weights=(2 * layer + ends) * itemsize,
        kept_activations=config.num_layers * (unit + attention_unit + log_sum_exp),
        backward_buffers=2 * unit + attention_unit + 4 * stage_queries + 4 * stage_kv + 4 * layer,
        tiles=max(mlp_tile, loss_tile + 4 * config.vocab_size * config.hidden_size),
    )
