"""The model sharded over data × context ranks by FSDP2: fp32 master weights, compute in bf16, gradients reduced in fp32.

Worked example, Llama3-8B on 8 ranks: each keeps 1/8 of every weight in fp32 (3.7 GiB in all). Before a layer runs, forward or
backward, its bf16 weights are gathered whole, once (416 MiB); the tile loops inside the layer gather nothing, so ranks
with different tile counts cannot wait for each other. Gradients are summed over the ranks, not averaged: the loss is already
divided by the number of unmasked tokens of the whole batch.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from megacp.checkpointing.huggingface import HuggingFaceWeights
from megacp.checkpointing.sharded_weights import read_weights
from megacp.model.config import ModelConfig
from megacp.model.initialization import initialize_weights
from megacp.model.llama import Llama


def shard_model(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> Llama:
    """Applies `fully_shard` in place: a unit per layer, one for each untied end, the rest in the root. `dtype` is that of compute."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = list(model.layers)
    if model.config.untie_embeddings_and_output_weights:
        units += [model.embedding, model.output_head]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    for module in (model, model.output_head):  # evaluation gathers weights as the forward does; no unit, nothing to gather
        register_fsdp_forward_method(module, "token_losses")
    return model


def build_model(config: ModelConfig, mesh: DeviceMesh, dtype: torch.dtype) -> Llama:
    """A sharded model on the meta device: everything but the weights."""
    with torch.device("meta"):
        model = Llama(config, dtype=torch.float32)
    return shard_model(model, mesh, dtype)


def allocate_weights(model: Llama, device: torch.device, seed: int, pretrained: HuggingFaceWeights | None = None) -> None:
    """Gives each rank its shards, with the weights of `pretrained` or, without it, initial ones from `seed`: the same for every layout.

    No rank ever holds the whole model; of `pretrained` it reads the rows that it keeps.
    """
    model.to_empty(device=device)
    if pretrained is None:
        initialize_weights(model, model.config, seed)
    else:
        read_weights(model, pretrained)
