"""FlashAttention-4 (`flash_attn.cute`, package flash-attn-4): the fastest on Hopper and Blackwell, all documents in one call.

Worked example: q_SHD [8, 4, 128], k_SKD [8, 1, 128] and the borders (0, 3, 8) give o_SHD [8, 4, 128] and lse_HS [4, 8].
A stream of one document goes in as a batch of one, [1, S, heads, D], a view. The first call of a kind compiles for seconds.
"""

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe
from megacp.kernels.attention.documents import Documents

MODULE = "flash_attn.cute.interface"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot serve; None when it can."""
    reason = probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(9, 0), maximum_head_dim=128)
    return reason or probe.import_error(MODULE)


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    return calls.forward_in_calls(_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return calls.backward_in_calls(_backward, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    if len(documents) == 1:
        o, lse, *_ = _flash_attn_fwd(q_SHD[None], k_SKD[None], v_SKD[None], softmax_scale=scale, causal=True, return_lse=True)
        return o[0], lse[0]
    o_SHD, lse_HS, *_ = _flash_attn_fwd(q_SHD, k_SKD, v_SKD, softmax_scale=scale, causal=True, return_lse=True,
                                        **_borders(documents, q_SHD))
    return o_SHD, lse_HS


def _backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
              scale: float) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    if len(documents) == 1:
        dq, dk, dv = _flash_attn_bwd(q_SHD[None], k_SKD[None], v_SKD[None], o_SHD[None], do_SHD[None], lse_HS[None],
                                     softmax_scale=scale, causal=True)
        return dq[0], dk[0], dv[0]
    return _flash_attn_bwd(q_SHD, k_SKD, v_SKD, o_SHD, do_SHD, lse_HS, softmax_scale=scale, causal=True,
                           **_borders(documents, q_SHD))


def _borders(documents: Documents, q_SHD: Tensor) -> dict[str, Tensor | int]:
    """Of the queries, which may be the last tokens of the stream only, and of the keys: a query sees the keys up to its own."""
    queries, keys = documents.device_cu_seqlens(q_SHD.device, len(q_SHD)), documents.device_cu_seqlens(q_SHD.device)
    longest = documents.max_seqlen
    return dict(cu_seqlens_q=queries, cu_seqlens_k=keys, max_seqlen_q=min(longest, len(q_SHD)), max_seqlen_k=longest)
