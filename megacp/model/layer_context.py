"""What a decoder layer is given besides hidden states: the micro-batch's context and its weights by name.

Worked example, the context of one rank of two, a stream of 16 tokens with a border at 5, Ulysses (all 8 heads in one stage):

    LayerContext(
        attention=AttentionSettings(build_head_schedule(8, 4, 2, 8), group, Documents((0, 5, 16)), scale=32**-0.5, backend="reference"),
        position_ids_T=torch.arange(8, 16),            # this rank's tokens
        inv_freq_D2=inverse_frequencies(32, 5e5), rotary_factor=1.0, tile_size=8192, store=store,
    )
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megacp.context_parallel.engine import AttentionSettings
from megacp.memory.store import ActivationStore


LEAST_TILE, MOST_TILE = 8192, 32768  # tokens, unless a size is asked for
TILE_ELEMENTS = 2**27  # beyond the least, of a tensor of MLP width


@dataclass(frozen=True)
class LayerContext:
    """Shared by all layers of a micro-batch. `tile_size`: tokens of a rank that one step of a loop over tokens handles."""

    attention: AttentionSettings
    position_ids_T: Tensor  # int64
    inv_freq_D2: Tensor  # float64, on the device of the hidden states
    rotary_factor: float
    tile_size: int
    store: ActivationStore  # where the layers keep what their backward needs

    @property
    def tokens(self) -> int:
        """T, tokens of this rank."""
        return len(self.position_ids_T)

    def tiles(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of each tile of the rank's tokens `[first, last)`, by default all; the last may be shorter.

        Tiles lie on multiples of the tile size, so `first` is one and `last` is one or the end.
        """
        return ((first + a, first + b) for a, b in tiles((self.tokens if last is None else last) - first, self.tile_size))


def tiles(tokens: int, tile_size: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of runs of `tile_size` tokens that cover `tokens`; the last may be shorter."""
    for start in range(0, tokens, tile_size):
        yield start, min(start + tile_size, tokens)


def default_tile_size(ffn_hidden_size: int, query_chunk: int | None = None) -> int:
    """Tokens of a tile where none are asked for: 8,192, or twice or four times that while `[t, F]` has 2^27 elements at most.

    The kernels of a narrow model are over before the host has launched the next ones. Measured on two H200s, 256K tokens, four
    stages: a step of llama3.2-1b (F 8,192) took 4.1 s in tiles of 8,192, 2.9 in 16,384 and in 32,768, with the same peak in the
    first two; where a tile makes the peak, as at 128K on eight, one of 16,384 takes 0.45 GiB more (predicted).
    `query_chunk`: tokens that are to be a multiple of the tile, if they are one of 8,192.

    >>> [default_tile_size(width) for width in (14336, 8192, 256)], default_tile_size(8192, query_chunk=24576)
    ([8192, 16384, 32768], 8192)
    """
    size = MOST_TILE
    while size > LEAST_TILE and (size * ffn_hidden_size > TILE_ELEMENTS or query_chunk and query_chunk % size):
        size //= 2
    return size


class LayerWeights(NamedTuple):
    """A layer's weights, or their gradient totals, in Hugging Face's shapes `[out, in]`. q_norm and k_norm: Qwen3, else None."""

    input_layernorm: Tensor  # [d]
    q_proj: Tensor  # [H·D, d]
    k_proj: Tensor  # [K·D, d]
    v_proj: Tensor  # [K·D, d]
    o_proj: Tensor  # [d, H·D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    post_attention_layernorm: Tensor  # [d]
    gate_proj: Tensor  # [F, d]
    up_proj: Tensor  # [F, d]
    down_proj: Tensor  # [d, F]
