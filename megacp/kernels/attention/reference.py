"""Causal attention per document in plain torch: any device, any floating dtype, the yardstick of the fast backends.

Worked example: q_SHD [8, 4, 16], k_SKD and v_SKD [8, 2, 16], Documents((0, 3, 8)) give o_SHD [8, 4, 16] and lse_HS [4, 8];
query heads 0 and 1 use key/value head 0, heads 2 and 3 use head 1.

    s = scale * q k^T,  lse = logsumexp(s),  p = exp(s - lse),  o = p v
    dv = p^T do,  ds = p * (do v^T - rowsum(do * o)) * scale,  dq = ds k,  dk = ds^T q          (arXiv 2205.14135, appendix B)

Queries go through in chunks, so that scores never exceed `SCORE_ELEMENTS` elements (64 MiB in fp32) unless one row of
all heads does: memory is O(chunk * document). Arithmetic is fp32 (float64 for float64 inputs). Sums are taken in one order, so it
is deterministic wherever the matrix products are: on a CPU with the same threads, on a GPU as --deterministic sets cuBLAS.
Suffixes: c queries of a chunk, n keys they may see, g query heads per key/value head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megacp.kernels.attention.documents import Documents
from megacp.kernels.precision import compute_dtype

SCORE_ELEMENTS = 2**24


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can."""
    return None if dtype.is_floating_point else f"{dtype} is not a floating dtype"


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q_SHD.dtype)
    heads = q_SHD.shape[1]
    o_SHD = torch.empty(q_SHD.shape, dtype=q_SHD.dtype, device=q_SHD.device)
    lse_HS = torch.empty(heads, len(q_SHD), dtype=dtype, device=q_SHD.device)
    for start, stop, row, before in _spans(documents, len(q_SHD)):
        k_KnD, v_KnD = (t[start:stop].transpose(0, 1).to(dtype) for t in (k_SKD, v_SKD))
        kv_heads = k_KnD.shape[0]
        for a, b in _chunks(stop - start - before, heads, stop - start):
            keys = before + b  # that the chunk's last query sees
            s_Kgcn = _scores(_grouped(q_SHD[row + a:row + b], kv_heads), k_KnD[:, :keys], scale)
            lse_Kgc = s_Kgcn.logsumexp(-1)
            p_Kgcn = s_Kgcn.sub_(lse_Kgc.unsqueeze(-1)).exp_()
            o_KgcD = (p_Kgcn.flatten(1, 2) @ v_KnD[:, :keys]).unflatten(1, (-1, b - a))
            o_SHD[row + a:row + b] = o_KgcD.flatten(0, 1).transpose(0, 1)
            lse_HS[:, row + a:row + b] = lse_Kgc.flatten(0, 1)
    return o_SHD, lse_HS


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q_SHD.dtype)
    dq_SHD, dk_SKD, dv_SKD = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_SHD, k_SKD, v_SKD))
    heads, kv_heads = q_SHD.shape[1], k_SKD.shape[1]
    for start, stop, row, before in _spans(documents, len(q_SHD)):
        k_KnD, v_KnD = (t[start:stop].transpose(0, 1).to(dtype) for t in (k_SKD, v_SKD))
        dk_KnD, dv_KnD = torch.zeros_like(k_KnD), torch.zeros_like(v_KnD)
        for a, b in _chunks(stop - start - before, heads, stop - start):
            rows, keys = slice(row + a, row + b), before + b
            q_KgcD = _grouped(q_SHD[rows], kv_heads).to(dtype)
            do_KgcD = _grouped(do_SHD[rows], kv_heads).to(dtype)
            delta_Kgc = (do_KgcD * _grouped(o_SHD[rows], kv_heads)).sum(-1)
            lse_Kgc = lse_HS[:, rows].unflatten(0, (kv_heads, -1))
            p_Kgcn = _scores(q_KgcD, k_KnD[:, :keys], scale).sub_(lse_Kgc.unsqueeze(-1)).exp_()
            q_KcD, do_KcD, p_Kcn = q_KgcD.flatten(1, 2), do_KgcD.flatten(1, 2), p_Kgcn.flatten(1, 2)
            dv_KnD[:, :keys] += p_Kcn.transpose(1, 2) @ do_KcD
            dp_Kcn = do_KcD @ v_KnD[:, :keys].transpose(1, 2)
            ds_Kcn = dp_Kcn.sub_(delta_Kgc.flatten(1, 2).unsqueeze(-1)).mul_(p_Kcn).mul_(scale)
            dk_KnD[:, :keys] += ds_Kcn.transpose(1, 2) @ q_KcD
            dq_KgcD = (ds_Kcn @ k_KnD[:, :keys]).unflatten(1, (-1, b - a))
            dq_SHD[rows] = dq_KgcD.flatten(0, 1).transpose(0, 1)
        dk_SKD[start:stop] = dk_KnD.transpose(0, 1)
        dv_SKD[start:stop] = dv_KnD.transpose(0, 1)
    return dq_SHD, dk_SKD, dv_SKD


def _spans(documents: Documents, queries: int) -> Iterator[tuple[int, int, int, int]]:
    """Per document its keys [start, stop), its first row among the queries, and its keys before that query's own."""
    missing = documents.total - queries  # tokens of the stream without a query, at its front
    for start, stop in documents.spans():
        yield start, stop, max(start - missing, 0), max(missing - start, 0)


def _chunks(queries: int, heads: int, keys: int) -> Iterator[tuple[int, int]]:
    """Query ranges of a document whose scores against all its keys stay within SCORE_ELEMENTS."""
    rows = max(1, SCORE_ELEMENTS // (heads * keys))
    return ((a, min(a + rows, queries)) for a in range(0, queries, rows))


def _grouped(x_cHD: Tensor, kv_heads: int) -> Tensor:
    """x_KgcD: the query heads gathered under the key/value head that they share."""
    return x_cHD.transpose(0, 1).unflatten(0, (kv_heads, -1))


def _scores(q_KgcD: Tensor, k_KnD: Tensor, scale: float) -> Tensor:
    """scale * q k^T, -inf for keys after the query; the last query's own key is the last one."""
    chunk, keys = q_KgcD.shape[2], k_KnD.shape[1]
    s_Kgcn = (q_KgcD.to(k_KnD.dtype).flatten(1, 2) @ k_KnD.transpose(1, 2)).mul_(scale).unflatten(1, (-1, chunk))
    future_cc = torch.ones(chunk, chunk, dtype=torch.bool, device=k_KnD.device).triu_(1)
    s_Kgcn[..., keys - chunk:].masked_fill_(future_cc, float("-inf"))
    return s_Kgcn
