"""A small model under FSDP2 for tests of what surrounds a model: optimizer, checkpoints, signals.

`sharded_model()` on every rank gives the same full weights, whatever the number of ranks; `train_step(model,
optimizer, step)` takes one step on data that depends on the step alone, so runs on any layout can be compared.
Seven rows do not divide by two or four ranks: the shards are uneven and some are empty.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megacp.training.optimizer import build_optimizer, clip_grad_norm


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, qk_layernorm: bool = False):
        super().__init__()
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.up_proj = nn.Parameter(torch.randn(hidden, width) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(width, hidden) * 0.3)
        if qk_layernorm:
            self.q_norm = nn.Parameter(torch.ones(width))

    def forward(self, h_td):
        x_td = nn.functional.rms_norm(h_td, h_td.shape[-1:], self.input_layernorm)
        return h_td + nn.functional.silu(x_td @ self.up_proj.T) @ self.down_proj.T


class Model(nn.Module):
    def __init__(self, width: int, hidden: int, num_layers: int, qk_layernorm: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden, qk_layernorm) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, h_td):
        for layer in self.layers:
            h_td = layer(h_td)
        return nn.functional.rms_norm(h_td, h_td.shape[-1:], self.norm)


def sharded_model(width=7, hidden=24, num_layers=2, seed=0, bf16=False, qk_layernorm=False) -> Model:
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Model(width, hidden, num_layers, qk_layernorm)
    torch.set_rng_state(generator_state)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def adamw(model: nn.Module, **changes) -> torch.optim.AdamW:
    settings = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    return build_optimizer(model, **settings | changes)


def backward(model: Model, step: int) -> None:
    """Gradients of a sum over the step's 8 samples, of which each rank takes its share (FSDP2 averages: hence `size`)."""
    samples = torch.randn(8, model.norm.shape[0], generator=torch.Generator().manual_seed(1000 + step))
    rank, size = dist.get_rank(), dist.get_world_size()
    share = samples[rank::size]
    (size * (model(share) * share.cos()).sum()).backward()


def train_step(model: Model, optimizer: torch.optim.Optimizer, step: int) -> float:
    backward(model, step)
    grad_norm = clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def full_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's two moments and step counts, by parameter name."""
    moments = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        moments[f"{name}.step"] = state["step"].clone()
        moments[f"{name}.exp_avg"] = state["exp_avg"].full_tensor().clone()
        moments[f"{name}.exp_avg_sq"] = state["exp_avg_sq"].full_tensor().clone()
    return moments
