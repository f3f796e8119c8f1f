"""Initial weights that depend on the seed alone, not on how the model is sharded.

Each weight has a generator of its own, seeded by the run's seed and the weight's name; a rank draws the whole weight and keeps its
shard. So 1 rank and 1,024 ranks start from the same numbers, and so do 2 and 32 layers in the layers they share.

Worked example: `layers.3.o_proj` of a 32-layer model is normal with standard deviation 0.02 / sqrt(2·32) = 0.0025.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megacp.model.config import ModelConfig


@torch.no_grad()
def initialize_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fills every parameter in place: norms with 1, the rest normal (`initial_std`). Peak memory: one whole weight."""
    for name, parameter in model.named_parameters():
        std = initial_std(name, config)
        whole = torch.ones(parameter.shape, device=parameter.device, dtype=torch.float32)
        if std is not None:
            generator = torch.Generator(parameter.device).manual_seed(_seed_of(name, seed))
            whole.normal_(0.0, std, generator=generator)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(_shard_of(whole, parameter))


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


def _shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of `whole`, cut as `fully_shard` cuts `parameter`: `torch.chunk` along dimension 0."""
    if not isinstance(parameter, DTensor):
        return whole
    (placement,) = parameter.placements
    if placement != Shard(0):
        raise ValueError(f"initialize_weights knows parameters sharded along dimension 0, not {placement}")
    mesh = parameter.device_mesh
    chunks = whole.chunk(mesh.size(), dim=0)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole[:0]
