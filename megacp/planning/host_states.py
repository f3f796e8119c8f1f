"""Host memory of a rank's states with --optimizer-cpu-offload: fp32 master weights, AdamW's two moments, gradients.

    >>> from megacp.model.config import preset
    >>> f"{host_state_bytes(preset('qwen3-32b'), ranks=8) / 2**30:.2f} GiB"      # 16 bytes for each of 4.1 billion elements: 61.03
    '65.51 GiB'

Weights and gradients are pinned, an allocation each, and PyTorch's allocator of pinned memory gives out powers of two: a shard of
5 MiB takes 8. The moments are ordinary memory.
"""

import math

from megacp.model.config import ModelConfig
from megacp.model.decoder_layer import layer_weight_shapes

FP32 = 4  # bytes


def host_state_bytes(config: ModelConfig, ranks: int) -> int:
    """Bytes of one of `ranks` ranks that share the model; of the one with the largest shards."""
    layer = [shape for shape in layer_weight_shapes(config).values() if shape is not None]
    table, norm = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    tables = [table] * (2 if config.untie_embeddings_and_output_weights else 1)
    return config.num_layers * sum(_bytes(shape, ranks) for shape in layer) + sum(_bytes(shape, ranks) for shape in [*tables, norm])


def _bytes(shape: tuple[int, ...], ranks: int) -> int:
    shard = -(-shape[0] // ranks) * math.prod(shape[1:]) * FP32
    return 2 * power_of_two(shard) + 2 * shard


def power_of_two(bytes_: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (bytes_ - 1).bit_length()
