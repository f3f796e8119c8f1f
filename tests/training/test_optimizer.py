"""AdamW and the gradient norm on shards, against the same on whole tensors in float64."""

import math

import pytest
import torch

from megacp.training.optimizer import build_optimizer, clip_grad_norm
from tests.distributed import run_distributed
from tests.training.sharded_model import Model, adamw, backward, full_weights, sharded_model


def plain_adamw(weights, gradients_by_step, lr, weight_decay, beta1, beta2, eps):
    """Loshchilov and Hutter 2019, algorithm 2, element by element in float64."""
    weights = {name: weight.double() for name, weight in weights.items()}
    mean = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    square = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for t, gradients in enumerate(gradients_by_step, start=1):
        for name, weight in weights.items():
            gradient = gradients[name].double()
            mean[name] = beta1 * mean[name] + (1 - beta1) * gradient
            square[name] = beta2 * square[name] + (1 - beta2) * gradient**2
            update = (mean[name] / (1 - beta1**t)) / ((square[name] / (1 - beta2**t)).sqrt() + eps)
            decay = weight_decay if weight.ndim >= 2 else 0.0
            weights[name] = weight - lr * (update + decay * weight)
    return weights


def steps_on_shards(rank, world_size, bf16):
    model = sharded_model(bf16=bf16)
    optimizer = adamw(model)
    before = full_weights(model)
    gradients_by_step = []
    for step in range(3):
        backward(model, step)
        gradients_by_step.append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return before, gradients_by_step, full_weights(model), dtypes


@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_steps_are_those_of_the_paper(bf16):
    for before, gradients_by_step, after, dtypes in run_distributed(steps_on_shards, 2, bf16):
        assert dtypes == {torch.float32}  # master weights, also when the model computes in bf16
        expected = plain_adamw(before, gradients_by_step, 0.02, 0.1, 0.9, 0.95, 1e-8)
        for name in expected:
            torch.testing.assert_close(after[name].double(), expected[name], rtol=1e-5, atol=1e-6)


def test_matrices_decay_and_vectors_do_not_in_the_order_of_the_model():
    model = Model(width=6, hidden=8, num_layers=2)
    model.layers[1].up_proj.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    assert [(group["weight_decay"], [names[p] for p in group["params"]]) for group in optimizer.param_groups] == [
        (0.1, ["layers.0.up_proj", "layers.0.down_proj", "layers.1.down_proj"]),
        (0.0, ["norm", "layers.0.input_layernorm", "layers.1.input_layernorm"]),
    ]
    assert all(group["fused"] for group in optimizer.param_groups)


def norms(rank, world_size):
    model = sharded_model(width=70, hidden=600)
    result = {}
    for max_norm in (0.0, 1e6, 0.5):
        model.zero_grad()
        backward(model, 0)
        before = {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}
        norm = clip_grad_norm(model, max_norm)
        after = {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}
        true_norm = math.sqrt(sum(g.square().sum().item() for g in before.values()))
        factor = min(1.0, max_norm / true_norm) if max_norm else 1.0
        error = max((after[name] - factor * before[name]).abs().max().item() for name in before)
        result[max_norm] = norm, true_norm, error
    return result


def test_norm_and_clipping_on_every_layout():
    by_layout = {world_size: run_distributed(norms, world_size) for world_size in (1, 2, 4)}
    for results in by_layout.values():
        for max_norm, (norm, true_norm, error) in results[0].items():
            assert norm == pytest.approx(true_norm, rel=1e-6)
            assert norm == pytest.approx(by_layout[1][0][max_norm][0], rel=1e-6)
            assert error < 1e-7 if max_norm == 0.5 else error == 0.0
            assert [other[max_norm][0] for other in results] == [norm] * len(results)  # the very same number


def norm_with_one_broken_shard(rank, world_size, value):
    model = sharded_model()
    backward(model, 0)
    if rank == world_size - 1:
        model.layers[0].up_proj.grad.to_local()[0, 0] = value
    before = [p.grad.to_local().clone() for p in model.parameters()]
    norm = clip_grad_norm(model, 0.5)
    after = [p.grad.to_local() for p in model.parameters()]
    return norm, all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_told_to_every_rank_and_scales_nothing(value):
    for norm, unchanged in run_distributed(norm_with_one_broken_shard, 2, value):
        assert not math.isfinite(norm) and unchanged


def test_norm_of_many_elements():
    """A plain fp32 sum over these loses 7 parts in 10,000."""
    model = torch.nn.Linear(2**12, 2**12, bias=False)
    model.weight.grad = torch.randn(2**12, 2**12, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = model.weight.grad.double().square().sum().sqrt().item()
    assert clip_grad_norm(model, 0.0) == pytest.approx(expected, rel=1e-6)


def test_norm_without_gradients_is_zero():
    assert clip_grad_norm(torch.nn.Linear(2, 2), 1.0) == 0.0
