"""cuDNN's fused attention through torch, one call per document.

Worked example: Documents((0, 3, 8)) make two calls on views [1, H, 3, D] and [1, H, 5, D] of q_SHD. A stream of one document
is one call and its results are returned without a copy.

cuDNN builds an execution plan for each new length (tens of milliseconds, kept by torch), so this suits few, long documents;
varied short ones are better packed. A document of one token is done in closed form, for cuDNN refuses length 1.
"""

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe
from megacp.kernels.attention.documents import Documents

aten = torch.ops.aten


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can."""
    reason = probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(8, 0), maximum_head_dim=128)
    if reason is None and probe.cudnn_version() < 90000:
        return f"cuDNN is {probe.cudnn_version()}, 90000 or newer is needed"
    if reason is None and deterministic:
        return "--deterministic: torch gives no access to a deterministic backward of cuDNN"  # pytorch#182551
    return reason


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    return calls.forward_in_calls(_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return calls.backward_in_calls(_backward, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    if len(documents) == 1:
        return _document_forward(q_SHD, k_SKD, v_SKD, scale)
    total, heads, head_dim = q_SHD.shape
    o_SHD = torch.empty(total, heads, head_dim, dtype=q_SHD.dtype, device=q_SHD.device)
    lse_HS = torch.empty(heads, total, dtype=torch.float32, device=q_SHD.device)
    for start, stop in documents.spans():
        tokens = slice(start, stop)
        o_SHD[tokens], lse_HS[:, tokens] = _document_forward(q_SHD[tokens], k_SKD[tokens], v_SKD[tokens], scale)
    return o_SHD, lse_HS


def _backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
              scale: float) -> tuple[Tensor, Tensor, Tensor]:
    if len(documents) == 1:
        return _document_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, scale)
    dq_SHD, dk_SKD, dv_SKD = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_SHD, k_SKD, v_SKD))
    for start, stop in documents.spans():
        tokens = slice(start, stop)
        dq_SHD[tokens], dk_SKD[tokens], dv_SKD[tokens] = _document_backward(
            do_SHD[tokens], q_SHD[tokens], k_SKD[tokens], v_SKD[tokens], o_SHD[tokens], lse_HS[:, tokens], scale)
    return dq_SHD, dk_SKD, dv_SKD


def _document_forward(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q_LHD.shape[0] == 1:
        return one_token_forward(q_LHD, k_LKD, v_LKD, scale)
    q, k, v = _batched(q_LHD, k_LKD, v_LKD)
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return o[0].transpose(0, 1), lse.reshape(lse.shape[1], lse.shape[2])


def _document_backward(do_LHD: Tensor, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, o_LHD: Tensor, lse_HL: Tensor,
                       scale: float) -> tuple[Tensor, Tensor, Tensor]:
    length = q_LHD.shape[0]
    if length == 1:
        return one_token_backward(do_LHD, q_LHD, k_LKD)
    do, q, k, v, o = _batched(do_LHD, q_LHD, k_LKD, v_LKD, o_LHD)
    lse = lse_HL.contiguous()[None, :, :, None]
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    gradients = aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, o, lse, no_dropout, no_dropout, None, None, None,
                                                                  length, length, 0.0, True, scale=scale)
    dq, dk, dv = (t[0].transpose(0, 1) for t in gradients)
    return dq, dk, dv


def one_token_forward(q_1HD: Tensor, k_1KD: Tensor, v_1KD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over a single key is 1: o is that key's value, lse the score."""
    group = q_1HD.shape[1] // k_1KD.shape[1]
    score_1H = (q_1HD.float() * k_1KD.float().repeat_interleave(group, 1)).sum(-1) * scale
    return v_1KD.repeat_interleave(group, 1), score_1H.transpose(0, 1)


def one_token_backward(do_1HD: Tensor, q_1HD: Tensor, k_1KD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the same: none for the score, the sum over the sharing query heads for the value."""
    dv_1KD = do_1HD.float().unflatten(1, (k_1KD.shape[1], -1)).sum(2).to(k_1KD.dtype)
    return torch.zeros_like(q_1HD), torch.zeros_like(k_1KD), dv_1KD


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[1, heads, L, D] views."""
    return tuple(t.transpose(0, 1)[None] for t in tensors)
