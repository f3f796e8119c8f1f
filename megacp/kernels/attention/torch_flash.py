"""The flash attention that torch itself carries, on CPU and on CUDA (FlashAttention-2).

CUDA takes the packed stream as it is: q_SHD [8, 4, 64], k_SKD [8, 2, 64] and the borders (0, 3, 8) as an int32 tensor go in,
o_SHD [8, 4, 64] and lse_HS [4, 8] come out. The CPU kernel knows no borders: one call per document and key/value head, whose
k and v are shared by its query heads through a stride of 0, so nothing is repeated in memory.

The CPU kernel gives a head to one thread, so its results have the same bits each time. The CUDA kernel's backward adds to dq in
any order, unless torch's global deterministic setting is on: then it holds the fp32 sum of dq once for each multiprocessor that a
head of a document gets, 132 times for one head of one document on an H200.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe, reference
from megacp.kernels.attention.documents import Documents
from megacp.kernels.precision import compute_dtype

aten = torch.ops.aten


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can."""
    if device.type == "cpu":
        supported = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return None if dtype in supported else f"torch's CPU flash attention takes floating dtypes, not {dtype}"
    return probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(8, 0), maximum_head_dim=256)


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    if q_SHD.device.type == "cpu" and len(q_SHD) < documents.total:
        return reference.forward(q_SHD, k_SKD, v_SKD, documents, scale)  # the CPU kernel's mask starts at the first key
    if q_SHD.device.type == "cpu":
        return _cpu_forward(q_SHD, k_SKD, v_SKD, documents, scale)
    return calls.forward_in_calls(_cuda_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    if q_SHD.device.type == "cpu" and len(q_SHD) < documents.total:
        return reference.backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)
    if q_SHD.device.type == "cpu":
        return _cpu_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)
    with _deterministic_torch() if deterministic else contextlib.nullcontext():
        return calls.backward_in_calls(_cuda_backward, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _cuda_forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    queries, keys, longest = *_borders(documents, q_SHD), _longest(documents)
    o_SHD, lse_HS, *_ = aten._flash_attention_forward(q_SHD, k_SKD, v_SKD, queries, keys, longest, longest, 0.0, True, False,
                                                      scale=scale)
    return o_SHD, lse_HS


def _cuda_backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor,
                   documents: Documents, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, longest = *_borders(documents, q_SHD), _longest(documents)
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q_SHD.device).view(torch.uint64)
    return aten._flash_attention_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, queries, keys, longest, longest, 0.0,
                                          True, no_dropout, no_dropout[:0], scale=scale)


@contextlib.contextmanager
def _deterministic_torch() -> Iterator[None]:
    """torch's global setting, which is all that the kernel asks, for the length of a call."""
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _borders(documents: Documents, q_SHD: Tensor) -> tuple[Tensor, Tensor]:
    """Of the queries, which may be the last tokens of the stream only, and of the keys."""
    return documents.device_cu_seqlens(q_SHD.device, len(q_SHD)), documents.device_cu_seqlens(q_SHD.device)


def _longest(documents: Documents) -> int:
    """An upper bound of the document length; at 1, FlashAttention-2 would swap heads and tokens for decoding."""
    return max(2, documents.max_seqlen)


def _cpu_forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    total, heads, head_dim = q_SHD.shape
    group = heads // k_SKD.shape[1]
    o_SHD = torch.empty(total, heads, head_dim, dtype=q_SHD.dtype)
    lse_HS = torch.empty(heads, total, dtype=compute_dtype(q_SHD.dtype))
    for start, stop in documents.spans():
        for kv_head in range(k_SKD.shape[1]):
            tokens, of_group = slice(start, stop), slice(kv_head * group, (kv_head + 1) * group)
            k, v = (_shared(t[tokens], kv_head, group) for t in (k_SKD, v_SKD))
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(_batched(q_SHD[tokens, of_group]), k, v, 0.0, True,
                                                                      scale=scale)
            o_SHD[tokens, of_group] = o[0].transpose(0, 1)
            lse_HS[of_group, tokens] = lse[0]
    return o_SHD, lse_HS


def _cpu_backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor,
                  documents: Documents, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dq_SHD, dk_SKD, dv_SKD = (torch.empty(t.shape, dtype=t.dtype) for t in (q_SHD, k_SKD, v_SKD))
    group = q_SHD.shape[1] // k_SKD.shape[1]
    for start, stop in documents.spans():
        for kv_head in range(k_SKD.shape[1]):
            tokens, of_group = slice(start, stop), slice(kv_head * group, (kv_head + 1) * group)
            k, v = (_shared(t[tokens], kv_head, group) for t in (k_SKD, v_SKD))
            do, q, o = (_batched(t[tokens, of_group]) for t in (do_SHD, q_SHD, o_SHD))
            lse = lse_HS[of_group, tokens].t().contiguous().t()  # the layout that the forward kernel returns
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse[None], 0.0, True,
                                                                                   scale=scale)
            dq_SHD[tokens, of_group] = dq[0].transpose(0, 1)
            dk_SKD[tokens, kv_head] = dk[0].sum(0, dtype=lse.dtype)
            dv_SKD[tokens, kv_head] = dv[0].sum(0, dtype=lse.dtype)
    return dq_SHD, dk_SKD, dv_SKD


def _batched(x_LgD: Tensor) -> Tensor:
    """[1, g, L, D], a view."""
    return x_LgD.transpose(0, 1)[None]


def _shared(x_LKD: Tensor, kv_head: int, group: int) -> Tensor:
    """[1, g, L, D], a view that shows one key/value head g times."""
    return x_LKD[None, None, :, kv_head].expand(-1, group, -1, -1)
