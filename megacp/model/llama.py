"""The decoder: embedding, layers, output head; parallelism stays outside, in the context it is called with.

Worked example, one rank of two with T tokens: `tokens_T` int64 → h_Td → … → loss, a scalar. The sum over the ranks of the
losses, with `grad_scale` = 1 / (unmasked labels of the global batch), is the mean loss of the batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacp.model.config import ModelConfig
from megacp.model.decoder_layer import DecoderLayer
from megacp.model.layer_context import LayerContext
from megacp.model.output_head import OutputHead


class Embedding(nn.Module):
    """Token embedding `weight [V, d]`."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight)


class Llama(nn.Module):
    """Llama or Qwen3 by `config`. Weights are allocated, not initialised: `initialize_weights` or a checkpoint fills them."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config, device, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, number, device, dtype) for number in range(config.num_layers))
        self.output_head = OutputHead(config, device, dtype)

    def forward(
        self, tokens_T: Tensor, labels_T: Tensor, context: LayerContext, grad_scale: float, loss_tile_size: int
    ) -> Tensor:
        """`grad_scale` times the summed loss of this rank's unmasked tokens (see `OutputHead.forward`)."""
        h_Td = self._hidden_states(tokens_T, context)
        return self.output_head(h_Td, labels_T, grad_scale, loss_tile_size, self._tied_weight())

    @torch.no_grad()
    def token_losses(self, tokens_T: Tensor, labels_T: Tensor, context: LayerContext, loss_tile_size: int) -> Tensor:
        """Loss of each of this rank's tokens, `[T]`, by the same forward without gradients (see `OutputHead.token_losses`).

        A layer's activations are freed when it returns.
        """
        h_Td = self._hidden_states(tokens_T, context)
        return self.output_head.token_losses(h_Td, labels_T, loss_tile_size, self._tied_weight())

    def _hidden_states(self, tokens_T: Tensor, context: LayerContext) -> Tensor:
        h_Td = self.embedding(tokens_T)
        for layer in self.layers:
            h_Td = layer(h_Td, context)
        return h_Td

    def _tied_weight(self) -> Tensor | None:
        return None if self.config.untie_embeddings_and_output_weights else self.embedding.weight
