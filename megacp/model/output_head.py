"""The output head: final RMSNorm, lm_head and cross-entropy as one tiled function that makes its gradients going forward.

    loss = grad_scale · Σ_t crossentropy(W · norm(h_t), label_t)

A tile's logits `[t, V]` live for that tile only: the cross-entropy turns them into their own gradient in place, and the tile's
share of dh and dW is added at once. So no `[T, V]` exists, logits are computed once, and memory does not depend on T but for dh.

Worked example, Llama3-8B, tile of 2,048: logits are 501 MiB in bf16 whatever T is; dW is one fp32 `[128256, 4096]` (1.96 GiB).
"""

import torch
from torch import Tensor, nn

from megacp.kernels.cross_entropy import cross_entropy_forward_backward_
from megacp.kernels.precision import compute_dtype
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.scale import scale_
from megacp.kernels.weight_gradient import accumulate_weight_gradient
from megacp.model.config import ModelConfig
from megacp.model.layer_context import tiles


class OutputHead(nn.Module):
    """Parameters `norm [d]` and, unless the embeddings are tied, `lm_head [V, d]`."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.norm_epsilon = config.norm_epsilon
        self.norm = nn.Parameter(torch.empty(config.hidden_size, device=device, dtype=dtype))
        untied = config.untie_embeddings_and_output_weights
        shape = (config.vocab_size, config.hidden_size)
        self.lm_head = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if untied else None

    def forward(
        self, h_Td: Tensor, labels_T: Tensor, grad_scale: float, tile_size: int, tied_weight_Vd: Tensor | None = None
    ) -> Tensor:
        """`grad_scale` times the sum of the losses of the unmasked tokens: a scalar, fp32 (float64 for float64 `h_Td`).

        `labels_T` int64, `IGNORE_INDEX` where masked; all masked gives 0 and zero gradients. `tied_weight_Vd` is the embedding of a
        model with tied weights.
        """
        weight_Vd = self.lm_head if tied_weight_Vd is None else tied_weight_Vd
        return _OutputHeadFunction.apply(h_Td, self.norm, weight_Vd, labels_T, grad_scale, tile_size, self.norm_epsilon)

    @torch.no_grad()
    def token_losses(self, h_Td: Tensor, labels_T: Tensor, tile_size: int, tied_weight_Vd: Tensor | None = None) -> Tensor:
        """Loss of each token, 0 where masked, without gradients: `[T]`, fp32 (float64 for float64 `h_Td`)."""
        weight_Vd = self.lm_head if tied_weight_Vd is None else tied_weight_Vd
        loss_T = torch.empty(len(h_Td), dtype=compute_dtype(h_Td.dtype), device=h_Td.device)
        for start, stop in tiles(len(h_Td), tile_size):
            logits_tV = rms_norm(h_Td[start:stop], self.norm, self.norm_epsilon) @ weight_Vd.t()
            loss_T[start:stop] = cross_entropy_forward_backward_(logits_tV, labels_T[start:stop], grad_scale=1.0)
        return loss_T


class _OutputHeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_Td, norm_d, weight_Vd, labels_T, grad_scale, tile_size, eps):
        dtype = compute_dtype(h_Td.dtype)
        total = torch.zeros((), dtype=torch.float64, device=h_Td.device)
        dh_Td = torch.empty_like(h_Td)
        made = torch.empty_like if len(h_Td) else torch.zeros_like  # the first tile overwrites it; without tokens there is none
        dnorm_d, dweight_Vd = torch.zeros_like(norm_d, dtype=dtype), made(weight_Vd, dtype=dtype)
        for start, stop in tiles(len(h_Td), tile_size):
            h_td = h_Td[start:stop]
            y_td = rms_norm(h_td, norm_d, eps)
            logits_tV = y_td @ weight_Vd.t()
            total += cross_entropy_forward_backward_(logits_tV, labels_T[start:stop], grad_scale).sum(dtype=torch.float64)
            accumulate_weight_gradient(dweight_Vd, logits_tV, y_td, first=start == 0)
            dy_td = logits_tV @ weight_Vd
            _, dnorm_tile_d = rms_norm_backward(dy_td, h_td, norm_d, eps, out=dh_Td[start:stop])
            dnorm_d += dnorm_tile_d
            del logits_tV, dy_td  # before the next tile's are made
        ctx.grads = dh_Td, dnorm_d, dweight_Vd
        return (total * grad_scale).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        if ctx.grads is None:
            raise RuntimeError("the output head runs backward once per forward: its gradients are handed over, not copied")
        grads, ctx.grads = ctx.grads, None
        return *(scale_(x, grad) for x in grads), None, None, None, None
