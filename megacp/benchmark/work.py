"""How much work a benchmark row is: documents of a stream, FLOPs that the model needs, FLOPs that the code executes.

Worked example, llama3-8b, one rank of 8, a stream of 8 tokens in two documents:

>>> from megacp.model.config import preset
>>> equal_borders(8, 2)
(0, 4, 8)
>>> layer_model_flops(preset("llama3-8b"), tokens=1, pairs=20, ranks=8)  # 6 * 218,103,808 weights + 3 * 4 * 32 * 128 * 20 / 8
1308745728
>>> attention_flops(heads=32, head_dim=128, pairs=20)  # forward: q·k and p·v; backward: five products of that size
(327680, 819200)

Model FLOPs are what the model needs, causal inside each document: recompute is not counted and the backward counts twice the
forward, as in `megacp.training.metrics`. Executed FLOPs are what a part really does; rates of parts are theirs.
"""

import random

from megacp.model.config import ModelConfig


def equal_borders(seq_length: int, documents: int) -> tuple[int, ...]:
    """Borders of a stream in `documents` documents whose lengths differ by one token at most."""
    return tuple(seq_length * i // documents for i in range(documents + 1))


def uneven_borders(seq_length: int, documents: int, seed: int) -> tuple[int, ...]:
    """Borders drawn at random: most documents are short, some are several times the mean."""
    inner = random.Random(seed).sample(range(1, seq_length), documents - 1)
    return (0, *sorted(inner), seq_length)


def layer_model_flops(config: ModelConfig, tokens: int, pairs: int, ranks: int) -> int:
    """Forward and backward of one layer on one rank of `ranks`: its `tokens`, and its share of all heads' `pairs`."""
    heads = 3 * 4 * config.num_attention_heads * config.kv_channels * pairs
    return 6 * config.layer_matmul_parameters() * tokens + heads // ranks


def head_model_flops(config: ModelConfig, tokens: int) -> int:
    """Forward and backward of the output head."""
    return 6 * config.vocab_size * config.hidden_size * tokens


def attention_flops(heads: int, head_dim: int, pairs: int) -> tuple[int, int]:
    """Executed forward and backward. The backward makes q·k again: five products where the forward has two."""
    forward = 4 * heads * head_dim * pairs
    return forward, forward * 5 // 2
