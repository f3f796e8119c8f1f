"""The output head's matrix products and cross-entropy for a tile of tokens: the losses, and the gradients of both factors at once.

    logits = y Wᵀ,   loss_t = logsumexp(logits_t) - logits_t[label],   dy = dlogits W,   dW += dlogitsᵀ y

Worked example: one token y_td = [[1]], W_Vd = [[0], [0]], labels_t = [1], grad_scale = 0.5. The loss is [ln 2] = [0.6931], dlogits is
[[0.25, -0.25]], so dy_td = [[0]] and dW_Vd = [[0.25], [-0.25]].

| implementation | where                | how                                                                                      |
|----------------|----------------------|------------------------------------------------------------------------------------------|
| native         | anywhere, any dtype  | three products; between them the cross-entropy makes dlogits in the memory of the logits |
| quack          | Hopper, bf16, QuACK  | the cross-entropy is part of the products: no logits are read or written beside them     |
"""

import functools
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor

from megacp.kernels.attention.probe import compute_capability, import_error
from megacp.kernels.cross_entropy import cross_entropy_forward_backward_
from megacp.kernels.triton_support import is_predicted
from megacp.kernels.weight_gradient import accumulate_weight_gradient

IMPLEMENTATIONS = NATIVE, QUACK = "native", "quack"

QUACK_MODULE = "megacp.kernels.linear_cross_entropy_quack"
QUACK_VERSIONS = "0.6."  # what is put together there changes between versions
ROWS = 128  # of a program of QuACK's products: tokens, and in the weight's gradient words of the vocabulary
COLUMN_TILES = (192, 128)  # words of a program of the first product, best first
POWER_WORDS = 64  # words for which a factor of a token is stored: every column tile is a multiple


def check_implementation(name: str, device: torch.device, dtype: torch.dtype, vocab: int, hidden: int, tile_size: int) -> None:
    """Raises ValueError that names --cross-entropy-fusion-impl when `linear_cross_entropy` cannot serve tiles of so many tokens by it."""
    refused = _quack_refusal(device, dtype, vocab, hidden, tile_size) if name == QUACK else None
    if refused:
        raise ValueError(f"--cross-entropy-fusion-impl {QUACK} cannot serve: {refused}; {NATIVE} can")


def linear_cross_entropy(
    y_td: Tensor, weight_Vd: Tensor, labels_t: Tensor, grad_scale: float, dweight_Vd: Tensor, first: bool, implementation: str = NATIVE
) -> tuple[Tensor, Tensor]:
    """Loss of each token, fp32 (float64 for float64 `y_td`), 0 where the label is IGNORE_INDEX; and the gradient of `y_td`.

    Gradients are those of grad_scale * (sum of losses). The weight's is added to `dweight_Vd`, fp32 or float64; the `first` tile
    overwrites what is there. Labels as of `cross_entropy_forward_backward_`. A last tile that is no multiple of 128 tokens
    takes the native way, also with "quack".
    """
    tokens, vocab = len(y_td), len(weight_Vd)
    if implementation == QUACK and tokens % ROWS == 0:
        if not is_predicted(y_td):
            from megacp.kernels.linear_cross_entropy_quack import linear_cross_entropy_quack

            return linear_cross_entropy_quack(y_td, weight_Vd, labels_t, grad_scale, dweight_Vd, first)
        scratch = Scratch.like(y_td, vocab)  # noqa: F841, counted beside the logits, in whose place are the exponentials
    logits_tV = y_td @ weight_Vd.t()
    loss_t = cross_entropy_forward_backward_(logits_tV, labels_t, grad_scale)
    accumulate_weight_gradient(dweight_Vd, logits_tV, y_td, first)
    return loss_t, logits_tV @ weight_Vd


@dataclass(frozen=True)
class Scratch:
    """What QuACK's way takes for a tile beside the exponentials, which take the place of the logits. n column tiles, b of 64 words.

    Worked example, Llama3-8B, 4,096 tokens: sums and offsets 2 x 10.4 MiB, powers 15.7 MiB, y scaled 32 MiB.
    """

    sum_tn: Tensor
    offset_tn: Tensor
    label_logit_t: Tensor
    scale_t: Tensor
    power_bt: Tensor
    scaled_td: Tensor

    @classmethod
    def like(cls, y_td: Tensor, vocab: int) -> "Scratch":
        tokens, statistic = len(y_td), {"dtype": torch.float32}
        tiles = vocab // column_tile(vocab)
        return cls(
            y_td.new_empty(tokens, tiles, **statistic), y_td.new_empty(tokens, tiles, **statistic),
            y_td.new_empty(tokens, **statistic), y_td.new_empty(tokens, **statistic),
            y_td.new_empty(vocab // POWER_WORDS, tokens), torch.empty_like(y_td),
        )  # fmt: skip


def column_tile(vocab: int) -> int | None:
    """Words of a column tile of the first product; None when no size divides the vocabulary, or ROWS does not."""
    return next((size for size in COLUMN_TILES if vocab % size == 0), None) if vocab % ROWS == 0 else None


def _quack_refusal(device: torch.device, dtype: torch.dtype, vocab: int, hidden: int, tile_size: int) -> str | None:
    """Why QuACK's way cannot serve; None when it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if compute_capability(device) != (9, 0):
        return "it is for Hopper (sm90)"
    if dtype != torch.bfloat16:
        return f"{str(dtype).removeprefix('torch.')}: it takes bfloat16"
    if column_tile(vocab) is None:
        return f"vocabulary {vocab:,}: it takes multiples of {ROWS}, such as --vocab-size {-(-vocab // ROWS) * ROWS}"
    if hidden % 8:
        return f"hidden size {hidden}: it takes multiples of 8"
    if tile_size % ROWS:
        return f"--loss-tile-size {tile_size}: it takes multiples of {ROWS}, such as {-(-tile_size // ROWS) * ROWS}"
    return _quack_error()


@functools.cache
def _quack_error() -> str | None:
    try:
        version = metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return "the package quack-kernels is not installed"
    if not version.startswith(QUACK_VERSIONS):
        return f"quack-kernels {version}: it is put together for {QUACK_VERSIONS}*"
    return import_error(QUACK_MODULE)
