"""Cuts a packed stream into kernel calls whose element offsets fit in 31 bits, of at most 65,535 documents.

GPU attention kernels multiply token index by row stride in places where the product is an int32: FlashAttention-2's
accumulator of dq, FlashAttention-4's offset of dout in varlen mode (flash-attention#1311, #1500, #2611). Past 2^31 elements
they fault or, worse, return finite wrong gradients. So no call here ever spans that many. FlashAttention-2 and -3 also launch
a grid with a row per document, of which CUDA allows 65,535 (flash-attention#1786). And since accumulators are padded by up to 128
tokens a document, no call has more documents than would double its memory.

Worked example, rows of H * D = 4 * 128 = 512 elements (4,194,304 tokens reach 2^31):
  one stream of 1M tokens                       one call, nothing copied
  6,000,000 tokens in documents of 1,000,000    two calls on views: documents 0 to 3, then 4 and 5
  one document of 5M tokens                     four calls, one query head each, on a contiguous copy of that head
  10,000 documents of 100 tokens                two calls on views: 7,812 documents (128 tokens of the stream each), 2,188

Where only the last tokens of a stream have queries, they begin in its first document: that call has fewer queries than keys.

The copies are of one head at a time and cost nothing beside attention over millions of tokens. A document is out of reach
only when one head of it passes the limit: 16.7M tokens at D = 128, which `offset_refusal` says beforehand.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megacp.kernels.attention.documents import DocumentRun, Documents

OFFSET_LIMIT = 2**31  # elements
PADDING = 128  # tokens by which kernels pad each document in their accumulators
DOCUMENT_LIMIT = 65535  # documents of a call
SHORT_DOCUMENT = PADDING  # tokens; below, padding is more than the document
FEW_DOCUMENTS = 4096  # whose padding is never too much: 256 MiB a head of an fp32 accumulator at D = 128

Forward = Callable[[Tensor, Tensor, Tensor, Documents, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents, float], tuple[Tensor, Tensor, Tensor]]


def longest_document(head_dim: int) -> int:
    """Tokens of the longest document of which a call of one head fits.

    >>> longest_document(128)
    16777087
    """
    return (OFFSET_LIMIT - 1) // head_dim - PADDING


def offset_refusal(documents: Documents, head_dim: int) -> str | None:
    """Why the stream cannot be cut into calls that fit; None when it can."""
    longest = longest_document(head_dim)
    if documents.max_seqlen <= longest:
        return None
    return (f"one head of a document of {documents.max_seqlen} tokens has more than 2^31 elements; documents of up to"
            f" {longest} tokens fit at head dim {head_dim}")


def forward_in_calls(kernel: Forward, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents,
                     scale: float) -> tuple[Tensor, Tensor]:
    row = _row_elements(q_SHD, k_SKD, v_SKD)
    if len(documents) <= _most(documents) and _fits(documents, row):
        return kernel(q_SHD, k_SKD, v_SKD, documents, scale)
    queries, heads, head_dim = q_SHD.shape
    group = heads // k_SKD.shape[1]
    o_SHD = torch.empty(queries, heads, head_dim, dtype=q_SHD.dtype, device=q_SHD.device)
    lse_HS = torch.empty(heads, queries, dtype=torch.float32, device=q_SHD.device)
    for run in _runs(documents, row):
        keys, tokens = slice(run.start, run.stop), _queries_of(run, documents, queries)
        q, k, v = q_SHD[tokens], k_SKD[keys], v_SKD[keys]
        if _fits(run.documents, row):
            o_SHD[tokens], lse_HS[:, tokens] = kernel(q, k, v, run.documents, scale)
            continue
        for head in range(heads):
            q_1, k_1, v_1 = _one_head(head, q), _one_head(head // group, k), _one_head(head // group, v)
            o, lse = kernel(q_1, k_1, v_1, run.documents, scale)
            o_SHD[tokens, head:head + 1], lse_HS[head:head + 1, tokens] = o, lse
    return o_SHD, lse_HS


def backward_in_calls(kernel: Backward, do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor,
                      lse_HS: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    row = _row_elements(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD)
    if len(documents) <= _most(documents) and _fits(documents, row):
        return kernel(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS.contiguous(), documents, scale)
    dq_SHD, dk_SKD, dv_SKD = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_SHD, k_SKD, v_SKD))
    kv_heads = k_SKD.shape[1]
    group = q_SHD.shape[1] // kv_heads
    for run in _runs(documents, row):
        keys, tokens = slice(run.start, run.stop), _queries_of(run, documents, len(q_SHD))
        do, q, k, v, o = do_SHD[tokens], q_SHD[tokens], k_SKD[keys], v_SKD[keys], o_SHD[tokens]
        lse = lse_HS[:, tokens].contiguous()
        if _fits(run.documents, row):
            dq_SHD[tokens], dk_SKD[keys], dv_SKD[keys] = kernel(do, q, k, v, o, lse, run.documents, scale)
            continue
        for kv_head in range(kv_heads):
            k_1, v_1 = _one_head(kv_head, k), _one_head(kv_head, v)
            dk_sum, dv_sum = (torch.zeros(k_1.shape, dtype=torch.float32, device=k.device) for _ in range(2))
            for head in range(kv_head * group, (kv_head + 1) * group):
                dq, dk, dv = kernel(_one_head(head, do), _one_head(head, q), k_1, v_1, _one_head(head, o), lse[head:head + 1],
                                    run.documents, scale)
                dq_SHD[tokens, head:head + 1] = dq
                dk_sum += dk
                dv_sum += dv
            dk_SKD[keys, kv_head:kv_head + 1], dv_SKD[keys, kv_head:kv_head + 1] = dk_sum, dv_sum
    return dq_SHD, dk_SKD, dv_SKD


def _runs(documents: Documents, row: int) -> list[DocumentRun]:
    """Runs of documents that fit; one that does not is a document by itself."""
    return documents.runs((OFFSET_LIMIT - 1) // row, PADDING, _most(documents))


def _most(documents: Documents) -> int:
    """Documents of a call."""
    return min(DOCUMENT_LIMIT, max(FEW_DOCUMENTS, documents.total // SHORT_DOCUMENT))


def _queries_of(run: DocumentRun, documents: Documents, queries: int) -> slice:
    """The queries of a run, where they are those of the stream's last tokens."""
    before = documents.total - queries
    return slice(max(run.start - before, 0), run.stop - before)


def _row_elements(*tensors: Tensor) -> int:
    """Elements from one token to the next, of the widest tensor; outputs are as wide as the heads of the inputs."""
    return max(max(t.stride(0), t.shape[1] * t.shape[2]) for t in tensors)


def _fits(documents: Documents, row: int) -> bool:
    return (documents.total + PADDING * len(documents)) * row < OFFSET_LIMIT


def _one_head(head: int, x_LHD: Tensor) -> Tensor:
    return x_LHD[:, head:head + 1].contiguous()
