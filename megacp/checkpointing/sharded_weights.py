"""Weights from a folder into a sharded model, each rank reading the rows it keeps and no others.

    read_weights(model, HuggingFaceWeights("Llama-3.1-8B"))      # 8 ranks: each reads an eighth, 2 GB of 16
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megacp.checkpointing.huggingface import HuggingFaceWeights
from megacp.model.row_shards import owned_rows


@torch.no_grad()
def read_weights(model: nn.Module, weights: HuggingFaceWeights) -> None:
    """Fills every parameter in place, in its own dtype. Memory: one weight of this rank."""
    for name, parameter in model.named_parameters():
        start, stop = owned_rows(parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if start < stop:
            local.copy_(weights.read(name, start, stop))
