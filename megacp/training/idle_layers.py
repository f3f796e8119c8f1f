"""Layers of a rehearsal that take a layer's memory and compute nothing: layers are alike, and a few that compute tell the peak.

    computing = computing_layers(job, plans, 2, device)     # [1, 31]: those in which a step of these plans is at its most
    with idle_layers(model, computing):
        train_step(...)                                     # the memory of 32 layers, the time of 2

FSDP gathers and reduces an idle layer as any other; the weight gradients that it makes are as large, and zeros. Between forward
and backward it holds what its plan keeps on the device, in tensors of the same shapes; nothing of it goes to host or disk. What it
lacks is the working memory inside a forward or backward, so a phase's peak is seen only where it happens in a layer that computes.

Worked example, 6 layers that keep all on the device: each forward begins with more kept than the one before, so layer 5's is the
most. With each backward less is kept and more gradients are there, and it depends on the sizes whether layer 5, 4 or 1 has most.
The planner knows that for every layer, up to what the layers of a plan have in common, so the choice is exact.

Letters: T tokens of the rank, t of a tile, C ranks of the Ulysses group, n query and m new KV heads of a stage, D head dim, d
hidden size, F MLP width.
"""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from megacp.argument_checks import ArgumentError
from megacp.kernels.precision import compute_dtype
from megacp.memory.policy import GPU, LayerPlan
from megacp.model.layer_context import LayerContext, LayerWeights
from megacp.model.llama import Llama
from megacp.planner import Job, layer_totals
from megacp.training.wrapping import wrapped


def computing_layers(job: Job, plans: list[LayerPlan], count: int | None, device: torch.device) -> list[int]:
    """Numbers of `count` layers that tell the peak of every phase: of each plan, where forward and backward are at their most.

    The first ones beside these; with `count` None all. Raises ArgumentError naming --rehearse-layers when these are more.
    """
    if count is None or count == len(plans):
        return list(range(len(plans)))
    if device.type == "cpu":  # where the host's memory is the device's
        job = replace(job, states_on_host=False)
    forward, backward = layer_totals(job, plans)
    needed = set()
    for plan in dict.fromkeys(plans):
        most = [_at_most(totals, [number for number, of in enumerate(plans) if of == plan]) for totals in (forward, backward)]
        needed |= {min(most[0] & most[1])} if most[0] & most[1] else {min(most[0]), min(most[1])}
    if len(needed) > count:
        shown = ", ".join(map(str, sorted(needed)))
        raise ArgumentError(
            f"--rehearse-layers {count} cannot tell the peak: here layers {shown} have to compute, where memory is at its most in "
            f"forward or backward; --rehearse-layers {len(needed)} or more works",
            ({"rehearse_layers": len(needed)},),
        )
    others = [number for number in range(len(plans)) if number not in needed]
    return sorted([*needed, *others[: count - len(needed)]])


def _at_most(totals: list[float], numbers: list[int]) -> set[int]:
    most = max(totals[number] for number in numbers)
    return {number for number in numbers if totals[number] == most}


def idle_layers(model: Llama, computing: list[int]) -> AbstractContextManager[None]:
    """While the block runs, the layers that are not `computing` are idle. FSDP's hooks and others lie around `forward` and stay."""
    return wrapped([(layer, "forward", _idle_forward) for layer in model.layers if layer.number not in computing])


def _idle_forward(forward):
    layer = forward.__self__

    def through(h_Td: Tensor, context: LayerContext) -> Tensor:
        return _IdleLayerFunction.apply(h_Td, layer.number, context, *(getattr(layer, name) for name in LayerWeights._fields))

    return through


class _IdleLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_Td: Tensor, number: int, context: LayerContext, *weights: Tensor | None) -> Tensor:
        plan = context.store.plans[number]
        ctx.save_for_backward(*weights)
        ctx.kept = _kept(h_Td, plan, context, LayerWeights(*weights).gate_proj.shape[0])
        return h_Td.clone() if plan.h == GPU else h_Td.detach()  # a kept input is not the output's memory

    @staticmethod
    def backward(ctx, g_Td: Tensor):
        grads = [None if x is None else torch.zeros_like(x, dtype=compute_dtype(x.dtype)) for x in ctx.saved_tensors]
        ctx.kept = None
        return g_Td.contiguous(), None, None, *grads


def _kept(h_Td: Tensor, plan: LayerPlan, context: LayerContext, width: int) -> list[Tensor]:
    """What a layer of this plan keeps on the device."""
    g, stages = context.store.geometry, context.attention.schedule.stages
    kept = [h_Td.detach()] if plan.h == GPU else []
    if plan.output == GPU:
        kept += [h_Td.new_empty(g.stage_shape) for _ in stages]
    if plan.lse == GPU:
        kept += [h_Td.new_empty(g.stage_heads, g.ulysses_degree * g.tokens, dtype=g.lse_dtype) for _ in stages]
    if plan.products:
        for start, stop in context.tiles():
            kept += [h_Td.new_empty(stop - start, size) for size in (g.hidden_size, width, width)]  # h_mid_td, gate_tF, up_tF
        for chunk in context.attention.chunks:
            kept.append(h_Td.new_empty(g.ulysses_degree, chunk.stop - chunk.start, g.stage_heads, g.head_dim))  # q_CtnD
            if chunk.opens_stage:  # k_CTmD, v_CTmD
                kept += [h_Td.new_empty(g.ulysses_degree, g.tokens, chunk.stage.num_new_kv, g.head_dim) for _ in "kv"]
    return kept
