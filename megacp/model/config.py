"""The numbers that make a decoder: one frozen record, and the published models as presets.

    >>> config = preset("llama3-8b")
    >>> config.num_attention_heads, config.num_query_groups, config.kv_channels
    (32, 8, 128)
    >>> config.parameter_count()
    8030261248
    >>> dataclasses.replace(config, num_layers=2).parameter_count()
    1486901248

In the letters of the design: `d` hidden_size, `F` ffn_hidden_size, `H` num_attention_heads, `K` num_query_groups,
`D` kv_channels, `V` vocab_size. The field names are those of Megatron's flags. `H * D` need not equal `d` (Qwen3-32B: 8192, 5120).
"""

import dataclasses
import difflib

from megacp.kernels.rotary import RopeScaling


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama- or Qwen3-style decoder (RMSNorm, rotary positions, grouped queries, SwiGLU, no biases)."""

    name: str
    num_layers: int
    hidden_size: int  # d
    ffn_hidden_size: int  # F
    num_attention_heads: int  # H, query heads
    num_query_groups: int  # K, key/value heads; divides H
    kv_channels: int  # D, width of one head; even, because rotary positions turn pairs
    vocab_size: int  # V
    max_position_embeddings: int  # tokens; what the model was made for, not a limit
    rotary_base: float
    rope_scaling: RopeScaling | None  # None: plain rotary positions
    norm_epsilon: float
    qk_layernorm: bool  # RMSNorm over D on every query and key head (Qwen3)
    untie_embeddings_and_output_weights: bool  # True: lm_head has weights of its own
    init_method_std: float = 0.02

    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that are multiplied with every token: q, k, v, o and the three of the MLP."""
        query_width = self.num_attention_heads * self.kv_channels
        kv_width = self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (2 * query_width + 2 * kv_width)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size

    def layer_parameters(self) -> int:
        """All weights of one layer, its norms included."""
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        return self.layer_matmul_parameters() + norms

    def parameter_count(self) -> int:
        """All weights of the model. Tied embeddings count once."""
        tables = 2 if self.untie_embeddings_and_output_weights else 1
        return tables * self.vocab_size * self.hidden_size + self.num_layers * self.layer_parameters() + self.hidden_size


_LLAMA3 = dict(
    vocab_size=128256,
    rotary_base=500_000.0,
    norm_epsilon=1e-5,
    qk_layernorm=False,
)
_LLAMA32 = dict(
    **_LLAMA3,
    max_position_embeddings=131072,
    rope_scaling=RopeScaling(
        type="llama3",
        factor=32.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    untie_embeddings_and_output_weights=False,
)
_LLAMA30 = dict(
    **_LLAMA3,
    max_position_embeddings=8192,
    rope_scaling=None,
    untie_embeddings_and_output_weights=True,
)
_QWEN3 = dict(
    vocab_size=151936,
    max_position_embeddings=40960,
    rotary_base=1_000_000.0,
    rope_scaling=None,
    norm_epsilon=1e-6,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
)


def _preset(name, layers, hidden, ffn, heads, groups, channels, family) -> ModelConfig:
    return ModelConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        **family,
    )


# The published config.json of each model, except llama-tiny: small enough to learn something on two CPU cores in minutes.
PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        #       name           layers     d      F   H  K    D  family
        _preset("llama-tiny",      4,   256,   768,  8, 4,  32, {**_LLAMA30, "vocab_size": 4096,
                                                                "untie_embeddings_and_output_weights": False}),
        _preset("llama3.2-1b",    16,  2048,  8192, 32, 8,  64, _LLAMA32),
        _preset("llama3.2-3b",    28,  3072,  8192, 24, 8, 128, _LLAMA32),
        _preset("llama3-8b",      32,  4096, 14336, 32, 8, 128, _LLAMA30),
        _preset("llama3-70b",     80,  8192, 28672, 64, 8, 128, _LLAMA30),
        _preset("qwen3-8b",       36,  4096, 12288, 32, 8, 128, _QWEN3),
        _preset("qwen3-32b",      64,  5120, 25600, 64, 8, 128, _QWEN3),
    )
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The preset called `name`. Raises ValueError with the known names and the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)[0]
    raise ValueError(f"--model {name} is not known; {nearest} is the nearest of {', '.join(PRESETS)}")
