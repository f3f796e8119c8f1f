"""FlashAttention-3 (module `flash_attn_interface`, built from flash-attention's hopper folder): Hopper only.

Worked example: q_SHD [8, 4, 128], k_SKD [8, 1, 128] and the borders (0, 3, 8) give o_SHD [8, 4, 128] and lse_HS [4, 8].
"""

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe
from megacp.kernels.attention.documents import Documents

MODULE = "flash_attn_interface"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can."""
    reason = probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(9, 0), maximum_head_dim=256)
    if reason is None and probe.compute_capability(device)[0] != 9:
        return "FlashAttention-3 is for Hopper (sm90) alone"
    if reason is None and deterministic:
        # flash-attention#1596 and #1766; nothing in the Python module tells such a build from one that obeys
        return "--deterministic: builds before September 2025 ignore that setting without a word"
    return reason or probe.import_error(MODULE)


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    return calls.forward_in_calls(_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return calls.backward_in_calls(_backward, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    o_SHD, lse_HS, *_ = _flash_attn_forward(q_SHD, k_SKD, v_SKD, softmax_scale=scale, causal=True,
                                            **documents.kernel_borders(q_SHD))
    return o_SHD, lse_HS


def _backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
              scale: float) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_SHD, k_SKD, v_SKD))
    _flash_attn_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=True,
                         **documents.kernel_borders(q_SHD))
    return dq, dk, dv
