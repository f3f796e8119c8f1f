"""The model sharded over data × context ranks by FSDP2: fp32 master weights, compute in bf16, gradients summed and reduced in fp32.

Worked example, Llama3-8B on 8 ranks: each keeps 1/8 of every weight in fp32 (3.7 GiB in all). Before a layer runs, forward or
backward, its bf16 weights are gathered whole, once (416 MiB); the tile loops inside the layer gather nothing, so ranks
with different tile counts cannot wait for each other. Gradients are summed over the ranks, not averaged: the loss is already
divided by the number of unmasked tokens of the whole batch. A rank's gradients are fp32 sums over its tokens, and those of layers and
output head stay fp32 on the way into the reduction. The embedding's PyTorch's kernel rounds to bf16, and with tied embeddings the
head's is rounded too, as the two are added.

With `states_on_host` (--optimizer-cpu-offload) FSDP2 keeps these shards in host memory, pinned beside a GPU: a gather copies its
shards to the GPU on the way, a reduced gradient leaves for the host while the backward goes on, and the GPU holds neither.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module

from megacp.checkpointing.huggingface import HuggingFaceWeights
from megacp.checkpointing.sharded_weights import read_weights
from megacp.model.config import ModelConfig
from megacp.model.initialization import initialize_weights
from megacp.model.llama import Llama


def shard_model(model: Llama, mesh: DeviceMesh, dtype: torch.dtype, states_on_host: bool = False) -> Llama:
    """Applies `fully_shard` in place: a unit a layer, one for each untied end, the rest in the root. `dtype` is that of compute."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if states_on_host else OffloadPolicy()
    units = list(model.layers)
    if model.config.untie_embeddings_and_output_weights:
        units += [model.embedding, model.output_head]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    for unit in units:
        if unit is not model.embedding:
            unit.register_forward_pre_hook(_gradients_in_fp32)
    for module in (model, model.output_head):  # evaluation gathers weights as the forward does; no unit, nothing to gather
        register_fsdp_forward_method(module, "token_losses")
    return model


def _gradients_in_fp32(unit: Module, _inputs: tuple) -> None:
    """Before a unit's forward, when its weights are gathered: their gradients are not rounded to the weights' bf16."""
    for weight in unit.parameters():
        if weight.dtype.itemsize == 2 and weight.grad_dtype != torch.float32:
            weight.grad_dtype = torch.float32


def build_model(config: ModelConfig, mesh: DeviceMesh, dtype: torch.dtype, states_on_host: bool = False) -> Llama:
    """A sharded model on the meta device: everything but the weights."""
    with torch.device("meta"):
        model = Llama(config, dtype=torch.float32)
    return shard_model(model, mesh, dtype, states_on_host)


def allocate_weights(
    model: Llama, device: torch.device, seed: int, pretrained: HuggingFaceWeights | None = None, states_on_host: bool = False
) -> None:
    """Gives each rank its shards, with the weights of `pretrained` or, without it, initial ones from `seed`, alike on every layout.

    No rank ever holds the whole model; of `pretrained` it reads the rows that it keeps. `states_on_host` as the model was built.
    Raises ValueError naming --optimizer-cpu-offload when the host cannot give the memory.
    """
    try:
        model.to_empty(device="cpu" if states_on_host else device)
    except RuntimeError as error:  # torch's for a failed pin and a failed allocation; a GPU that is full is another matter
        if not states_on_host or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"--optimizer-cpu-offload: the host refused memory for this rank's weights ({str(error).splitlines()[0]}); more ranks "
            "share the states further, and without the flag they take GPU memory"
        ) from error
    if pretrained is None:
        initialize_weights(model, model.config, seed, device)
    else:
        read_weights(model, pretrained)
