"""Weights from a folder into a sharded model, each rank reading the rows it keeps and no others.

    read_weights(model, HuggingFaceWeights("Llama-3.1-8B"))      # 8 ranks: each reads an eighth, 2 GB of 16

`fully_shard` cuts a weight along dimension 0 as `torch.chunk` does:

    >>> [chunk_bounds(7, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    >>> [chunk_bounds(2, 4, rank) for rank in range(4)]
    [(0, 1), (1, 2), (2, 2), (2, 2)]
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megacp.checkpointing.huggingface import HuggingFaceWeights


@torch.no_grad()
def read_weights(model: nn.Module, weights: HuggingFaceWeights) -> None:
    """Fills every parameter in place, in its own dtype. Memory: one weight of this rank."""
    for name, parameter in model.named_parameters():
        start, stop = owned_rows(parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if start < stop:
            local.copy_(weights.read(name, start, stop))


def owned_rows(parameter: Tensor) -> tuple[int, int]:
    """Rows of the whole weight that this rank keeps, `(start, stop)`."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    (placement,) = parameter.placements
    if placement != Shard(0):
        raise ValueError(f"read_weights knows parameters sharded along dimension 0, not {placement}")
    return chunk_bounds(parameter.shape[0], parameter.device_mesh.size(), parameter.device_mesh.get_local_rank())


def chunk_bounds(rows: int, chunks: int, index: int) -> tuple[int, int]:
    size = -(-rows // chunks)
    return min(index * size, rows), min((index + 1) * size, rows)
