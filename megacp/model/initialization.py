"""Initial weights that depend on the seed alone, not on how the model is sharded.

Each weight has a generator of its own, seeded by the run's seed and the weight's name; a rank draws the whole weight and keeps its
shard. So 1 rank and 1,024 ranks start from the same numbers, and so do 2 and 32 layers in
the layers they share (o_proj and down_proj up to their scale).

Worked example: `layers.3.o_proj` of a 32-layer model is normal with standard deviation 0.02 / sqrt(2·32) = 0.0025.
"""

import hashlib
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megacp.model.config import ModelConfig
from megacp.model.row_shards import owned_rows


@torch.no_grad()
def initialize_weights(model: nn.Module, config: ModelConfig, seed: int, device: torch.device | None = None) -> None:
    """Fills every parameter in place: norms with 1, the rest normal (`initial_std`). Peak memory: one whole weight.

    `device` draws the numbers, which differ from one kind of device to another; None: that of the parameter.
    """
    for name, parameter in model.named_parameters():
        std = initial_std(name, config)
        whole = torch.ones(parameter.shape, device=device or parameter.device, dtype=torch.float32)
        if std is not None:
            generator = torch.Generator(whole.device).manual_seed(_seed_of(name, seed))
            whole.normal_(0.0, std, generator=generator)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        start, stop = owned_rows(parameter)
        local.copy_(whole[start:stop])


def initial_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of a weight's initial normal distribution; None for norms, which start at 1.

    Projections back into the residual stream are scaled by `1/sqrt(2·layers)`, as in GPT-2 and Megatron.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("norm"):
        return None
    residual = leaf in ("o_proj", "down_proj")
    return config.init_method_std / math.sqrt(2 * config.num_layers) if residual else config.init_method_std


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
