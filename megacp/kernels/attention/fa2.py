"""FlashAttention-2 from the flash-attn package (module `flash_attn.flash_attn_interface`), for GPUs from Ampere on.

Worked example: q_SHD [8, 4, 128], k_SKD [8, 1, 128] and the borders (0, 3, 8) give o_SHD [8, 4, 128] and lse_HS [4, 8].
The same kernel as torch's own (`torch_flash`), in the version that the package brings. Deterministic, its backward holds the
fp32 sum of dq once for each multiprocessor that a head of a document gets: 132 times for one head of one document on an H200.
"""

import functools

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe
from megacp.kernels.attention.documents import Documents

MODULE = "flash_attn.flash_attn_interface"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can."""
    reason = probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(8, 0), maximum_head_dim=256)
    return reason or probe.import_error(MODULE)


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    return calls.forward_in_calls(_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    kernel = functools.partial(_backward, deterministic=deterministic)
    return calls.backward_in_calls(kernel, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    o_SHD, lse_HS, *_ = _flash_attn_varlen_forward(q_SHD, k_SKD, v_SKD, **_settings(documents, q_SHD, scale),
                                                   return_softmax=False)
    return o_SHD, lse_HS


def _backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
              scale: float, *, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_SHD, k_SKD, v_SKD))
    _flash_attn_varlen_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, dq, dk, dv,
                                **_settings(documents, q_SHD, scale), deterministic=deterministic)
    return dq, dk, dv


def _settings(documents: Documents, q_SHD: Tensor, scale: float) -> dict:
    """What both directions take. At a longest document of 1 the kernel would swap heads and tokens for decoding."""
    queries, keys = documents.device_cu_seqlens(q_SHD.device, len(q_SHD)), documents.device_cu_seqlens(q_SHD.device)
    longest = max(2, documents.max_seqlen)
    return dict(cu_seqlens_q=queries, cu_seqlens_k=keys, max_seqlen_q=longest, max_seqlen_k=longest, dropout_p=0.0,
                softmax_scale=scale, causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)
