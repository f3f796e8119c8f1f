"""A Llama or Qwen3 decoder layer whose forward and backward are two explicit schedules.

    h_mid = h + Wo · attention(RoPE(Wq · norm(h)), RoPE(Wk · norm(h)), Wv · norm(h))
    h_out = h_mid + W_down · (silu(W_gate · norm(h_mid)) * W_up · norm(h_mid))

Autograd sees one node. Between forward and backward the layer keeps its input `h` (1 u), the attention output `O` (1 u, stage by
stage) and the log-sum-exp, where the plan of the activation store says: on the device, in host memory, on disk. Backward makes
everything else again, tile by tile, but not the attention forward, unless the plan says `recompute`; with `products` the results of
the matrix products are kept too. `u` is one `[T, d]` tensor of a rank.

Worked example, Llama3-8B on 8 ranks at 1M tokens: `u` is 1 GiB; 2 GiB a layer are kept, and no tensor of MLP width (3.5 u) exists
for more than a tile of `tile_size` tokens.

Letters: T tokens of the rank, t of a tile, C ranks of the Ulysses group, n heads of a stage for one rank, o = H·D, d hidden size,
F MLP width.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megacp.context_parallel.engine import stages_backward, stages_forward
from megacp.kernels.head_layout import unpack_heads
from megacp.kernels.precision import compute_dtype
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.swiglu import swiglu_, swiglu_backward_
from megacp.kernels.weight_gradient import accumulate_weight_gradient
from megacp.memory.host_region import Pending
from megacp.memory.policy import GPU, RECOMPUTE
from megacp.memory.shelves import DeviceRows, StageShelf, read_ahead
from megacp.model.attention_projections import AttentionProjections
from megacp.model.config import ModelConfig
from megacp.model.layer_context import LayerContext, LayerWeights


class DecoderLayer(nn.Module):
    """Decoder layer `number`. Parameters are named and shaped as in `LayerWeights`; `None` where the model has no q/k norm."""

    def __init__(
        self, config: ModelConfig, number: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        self.config, self.number = config, number
        for name, shape in layer_weight_shapes(config).items():
            weight = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, weight)

    def forward(self, h_Td: Tensor, context: LayerContext) -> Tensor:
        """`h_Td` → `h_Td`. Where the store keeps the input off the device, its memory becomes the output's.

        Backward overwrites the gradient it is given: it becomes the gradient of the input.
        """
        weights = (getattr(self, name) for name in LayerWeights._fields)
        return _DecoderLayerFunction.apply(h_Td, self.config, self.number, context, *weights)


def layer_weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...] | None]:
    """Shape of each weight by its `LayerWeights` name; None for the q/k norms of a model without them."""
    hidden, width = config.hidden_size, config.ffn_hidden_size
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    head_norm = (config.kv_channels,) if config.qk_layernorm else None
    shapes = LayerWeights(
        input_layernorm=(hidden,), q_proj=(queries, hidden), k_proj=(keys, hidden), v_proj=(keys, hidden),
        o_proj=(hidden, queries), q_norm=head_norm, k_norm=head_norm, post_attention_layernorm=(hidden,),
        gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width),
    )  # fmt: skip
    return shapes._asdict()


class _DecoderLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_Td: Tensor, config: ModelConfig, number: int, context: LayerContext, *weights: Tensor | None) -> Tensor:
        w = LayerWeights(*weights)
        kept = context.store.keep(number, h_Td)
        projections = AttentionProjections(context, DeviceRows(h_Td), w, config.norm_epsilon, config.kv_channels)
        attention = replace(context.attention, prefetch=kept.plan.prefetch)
        received = None if kept.products is None else kept.products.received
        stages_forward(attention, projections.turn, kept.outputs, kept.lse, received)
        h_out_Td = h_Td.detach() if kept.input_is_free else torch.empty_like(h_Td)
        for (start, stop), o_stages in read_ahead(context.tiles(), _output_tiles(context, kept.outputs)):
            h_mid_td = torch.addmm(h_Td[start:stop], _gather_heads(context, o_stages), w.o_proj.t())
            kept.wait_for_tile(start)
            h_out_Td[start:stop], products = _mlp_forward(h_mid_td, w, config.norm_epsilon, keep=kept.products is not None)
            if kept.products is not None:
                kept.products.mlp[start] = products
        kept.rest()
        ctx.save_for_backward(*weights)
        ctx.config, ctx.context, ctx.kept = config, context, kept
        return h_out_Td

    @staticmethod
    def backward(ctx, g_Td: Tensor):
        if ctx.kept is None:
            raise RuntimeError("a decoder layer runs backward once per forward: what it kept is freed on the way")
        w, config, context = LayerWeights(*ctx.saved_tensors), ctx.config, ctx.context
        kept, ctx.kept = ctx.kept, None
        kept.check()
        grads = LayerWeights(*(None if x is None else torch.zeros_like(x, dtype=compute_dtype(x.dtype)) for x in w))
        g_Td = g_Td.contiguous()  # a tensor of our own when it was not: from here on it is overwritten
        projections = AttentionProjections(context, kept.h, w, config.norm_epsilon, config.kv_channels, grads)
        attention = replace(context.attention, prefetch=kept.plan.prefetch)
        outputs, log_sum_exps = kept.outputs, kept.lse
        received = None if kept.products is None else kept.products.received
        if kept.plan.output == RECOMPUTE:
            outputs, log_sum_exps = context.store.stages(None), context.store.log_sum_exps(None)
            stages_forward(attention, projections.turn, outputs, log_sum_exps)

        residual = DeviceRows(g_Td) if kept.plan.residual_grad == GPU else context.store.residual_rows(g_Td)
        leaving = []
        fetch_output = _output_tiles(context, outputs)
        for (start, stop), (h_td, *o_stages) in read_ahead(context.tiles(), lambda t: [kept.h.fetch(*t), *fetch_output(t)]):
            o_to, g_td = _gather_heads(context, o_stages), g_Td[start:stop]
            if kept.products is None:
                _mlp_backward_(g_td, torch.addmm(h_td, o_to, w.o_proj.t()), None, w, grads, config.norm_epsilon)
            else:
                h_mid_td, *gate_up = kept.products.mlp.pop(start)
                _mlp_backward_(g_td, h_mid_td, gate_up, w, grads, config.norm_epsilon)
                del h_mid_td, gate_up
            accumulate_weight_gradient(grads.o_proj, g_td, o_to)
            if kept.plan.residual_grad != GPU:
                leaving.append(residual.put(start, stop, g_td))
        del h_td, o_stages, o_to, g_td  # the last tile's views would keep the outputs of all stages
        outputs.rest()
        for pending in leaving:
            pending.wait()

        # The residual gradient's own memory, once that is kept elsewhere.
        projections.dxn_Td = torch.zeros_like(g_Td) if kept.plan.residual_grad == GPU else g_Td.zero_()
        projections.residual = residual
        last = stages_backward(attention, projections.turn, projections.pack_do, outputs, log_sum_exps, received)
        projections.close(last, g_Td)
        return g_Td, None, None, None, *grads


def _mlp_forward(h_mid_td: Tensor, w: LayerWeights, eps: float, keep: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`h_mid + MLP(norm(h_mid))` of one tile, and `(h_mid_td, gate_tF, up_tF)` if they are to be kept; else their memory is used."""
    y_td = rms_norm(h_mid_td, w.post_attention_layernorm, eps)
    gate_tF, up_tF = y_td @ w.gate_proj.t(), y_td @ w.up_proj.t()
    if keep:
        return torch.addmm(h_mid_td, swiglu_(gate_tF.clone(), up_tF), w.down_proj.t()), (h_mid_td, gate_tF, up_tF)
    return h_mid_td.addmm_(swiglu_(gate_tF, up_tF), w.down_proj.t()), None


def _mlp_backward_(
    g_td: Tensor, h_mid_td: Tensor, gate_up: list[Tensor] | None, w: LayerWeights, grads: LayerWeights, eps: float
) -> None:
    """Turns `g_td` from the gradient of the layer's output into that of `h_mid`, in place; adds to the weight gradients.

    `gate_up` as the forward kept them, which are overwritten; None: they are made again.
    """
    y_td = rms_norm(h_mid_td, w.post_attention_layernorm, eps)
    gate_tF, up_tF = gate_up or (y_td @ w.gate_proj.t(), y_td @ w.up_proj.t())
    dgate_tF, dup_tF, z_tF = swiglu_backward_(g_td @ w.down_proj, gate_tF, up_tF)
    accumulate_weight_gradient(grads.down_proj, g_td, z_tF)
    del z_tF
    accumulate_weight_gradient(grads.gate_proj, dgate_tF, y_td)
    accumulate_weight_gradient(grads.up_proj, dup_tF, y_td)
    dy_td = (dgate_tF @ w.gate_proj).addmm_(dup_tF, w.up_proj)
    _, dnorm_d = rms_norm_backward(dy_td, h_mid_td, w.post_attention_layernorm, eps, residual=g_td, out=g_td)
    grads.post_attention_layernorm.add_(dnorm_d)


def _output_tiles(context: LayerContext, outputs: StageShelf) -> Callable[[tuple[int, int]], list[Pending]]:
    """Fetches a tile of the attention outputs, one tensor a stage."""
    stages = range(len(context.attention.schedule.stages))
    return lambda tile: [outputs.fetch_tile(stage, *tile) for stage in stages]


def _gather_heads(context: LayerContext, stages_CtnD: list[Tensor]) -> Tensor:
    """All heads of a tile in natural order, `[t, H·D]`, from the outputs of the stages."""
    schedule = context.attention.schedule
    ranks, tokens, _, head_dim = stages_CtnD[0].shape
    tile_tCnD = stages_CtnD[0].new_empty(tokens, ranks, schedule.heads_per_rank, head_dim)
    for stage, o_CtnD in zip(schedule.stages, stages_CtnD):
        unpack_heads(o_CtnD, 1, out=tile_tCnD[:, :, stage.q_start : stage.q_stop])
    return tile_tCnD.flatten(1)
