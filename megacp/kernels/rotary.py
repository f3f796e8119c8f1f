"""Rotary position embedding with angles that stay exact at positions of many millions (Su et al., arXiv 2104.09864).

Pair i of a head is (x[i], x[i + D/2]), Hugging Face's half-split order; token at position p turns it by p * inv_freq[i]:

    y[i] = x[i] cos - x[i + D/2] sin,   y[i + D/2] = x[i + D/2] cos + x[i] sin

Worked example: D = 4, base = 10000 give inv_freq = [1, 0.01]. At position 3 the two angles are [3, 0.03] rad. A float32
angle near 10,000,000 is off by up to 0.5 rad; here angle and range reduction are float64 (off by some 1e-9 rad), then
cos and sin are rounded. They are made per tile of tokens, [t, D/2]: there is no table over the sequence.

Long-context scaling: `llama3` (Llama 3.1: long wavelengths slowed down by `factor`, a ramp between) and `yarn`
(Peng et al., arXiv 2309.00071, eq. 17, 18 and 22). Both as in transformers' ROPE_INIT_FUNCTIONS, so checkpoints mean the same.
"""

import dataclasses
import math

import torch
from torch import Tensor

from megacp.kernels.triton_support import serves


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are slowed for contexts beyond the pre-training length; fields named as in Hugging Face configs."""

    type: str  # "llama3" or "yarn"
    factor: float  # long context / original context
    original_max_position_embeddings: int  # tokens of the original context
    low_freq_factor: float = 1.0  # llama3: wavelengths longer than original / low are slowed fully
    high_freq_factor: float = 4.0  # llama3: wavelengths shorter than original / high are kept
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this over the original context are kept
    beta_slow: float = 1.0  # yarn: pairs that turn less often than this are slowed fully
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None = 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        if self.type not in ("llama3", "yarn"):
            raise ValueError(f"--rope-scaling-type {self.type} is unknown; llama3 and yarn are known")
        if self.factor < 1:
            raise ValueError(f"RoPE scaling factor {self.factor} must be at least 1, such as 8")
        if self.original_max_position_embeddings < 1:
            raise ValueError(f"RoPE scaling original_max_position_embeddings {self.original_max_position_embeddings} must be"
                             " positive, such as 8192")
        if self.type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"RoPE scaling low_freq_factor {self.low_freq_factor} must be positive and less than"
                             f" high_freq_factor {self.high_freq_factor}, such as 1 and 4")
        if self.type == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"RoPE scaling beta_slow {self.beta_slow} must be positive and at most beta_fast"
                             f" {self.beta_fast}, such as 1 and 32")


def inverse_frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None,
                        device: torch.device | str | None = None) -> Tensor:
    """Angle per position of each pair, rad per token, float64 [D/2]."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"--kv-channels {head_dim} must be even and positive for rotary embedding, such as 128")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = torch.tensor(float(base), dtype=torch.float64).pow(-exponents)
    if scaling is not None:
        scale = _llama3 if scaling.type == "llama3" else _yarn
        frequencies = scale(frequencies, head_dim, base, scaling)
    return frequencies.to(device)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: YaRN's temperature on q and k (eq. 22), 1.0 otherwise."""
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def rotary_cos_sin(position_ids_T: Tensor, inv_freq: Tensor, factor: float = 1.0,
                   dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos_tD2 and sin_tD2 times `factor`, for the int64 positions of a tile of tokens."""
    if inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq must be float64, as inverse_frequencies makes it, not {inv_freq.dtype}")
    if dtype == torch.float32:
        cos_tD2, sin_tD2 = (inv_freq.new_empty(len(position_ids_T), len(inv_freq), dtype=dtype) for _ in range(2))
        if serves(cos_tD2, sin_tD2):
            from megacp.kernels.rotary_triton import rotary_cos_sin_triton

            rotary_cos_sin_triton(position_ids_T, inv_freq, cos_tD2, sin_tD2, factor)
            return cos_tD2, sin_tD2
    angle_tD2 = position_ids_T.to(torch.float64).unsqueeze(-1) * inv_freq
    return angle_tD2.cos().mul_(factor).to(dtype), angle_tD2.sin().mul_(factor).to(dtype)


def apply_rotary(x_tHD: Tensor, cos_tD2: Tensor, sin_tD2: Tensor, inverse: bool = False, out: Tensor | None = None) -> Tensor:
    """Turn every head of x (leading dimensions before t allowed) by the angles of its token, into `out` if given.

    `inverse` applies the transpose, which is the backward: dx = apply_rotary(dy, cos, sin, inverse=True). `out` may be any
    strided view of the shape of x, also x itself. The product is in the wider dtype of x and cos, rounded once.
    """
    half = x_tHD.shape[-1] // 2
    if cos_tD2.shape != (x_tHD.shape[-3], half):
        raise ValueError(f"cos of shape {list(cos_tD2.shape)} does not fit x of shape {list(x_tHD.shape)};"
                         f" [{x_tHD.shape[-3]}, {half}] does")
    cos, sin = cos_tD2.unsqueeze(-2), sin_tD2.unsqueeze(-2)
    x1, x2 = x_tHD[..., :half], x_tHD[..., half:]
    sign = -1 if inverse else 1
    y1 = (x1 * cos).addcmul_(x2, sin, value=-sign)
    y2 = (x2 * cos).addcmul_(x1, sin, value=sign)
    if out is None:
        out = torch.empty_like(x_tHD, memory_format=torch.contiguous_format)
    out[..., :half].copy_(y1)
    out[..., half:].copy_(y2)
    return out


def _llama3(frequencies: Tensor, head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """Wavelengths shorter than original/high are kept, longer than original/low divided by factor, a linear ramp between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _yarn(frequencies: Tensor, head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """A linear ramp over pair indices, between the pairs that turn beta_fast and beta_slow times in the original context."""
    def pair_that_turns(count: float) -> float:
        return head_dim * math.log(scaling.original_max_position_embeddings / (count * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)
