"""One pair of functions over all attention backends, and the choice among them.

Worked example, 4 query heads on 2 key/value heads, two documents in a stream of 8 tokens:

    documents = Documents((0, 3, 8))
    choice = select_backend("auto", q.device, q.dtype, head_dim=64, q_heads=4, kv_heads=2, documents=documents)
    print(choice.reason)             # "torch: the fastest that serves CPU, float32, head dim 64; not fa4: ..."
    o_SHD, lse_HS = attention_forward(q_SHD, k_SKD, v_SKD, documents, scale=64**-0.5, backend=choice.name)
    dq, dk, dv = attention_backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, 64**-0.5, choice.name)

| backend   | where          | dtypes         | documents                                     |
|-----------|----------------|----------------|-----------------------------------------------|
| fa4       | sm90 and newer | bf16, fp16     | one call, any mix; one document: dense        |
| fa3       | sm90           | bf16, fp16     | one call                                      |
| cudnn     | sm80 and newer | bf16, fp16     | one call each: few and long                   |
| torch     | CUDA, CPU      | bf16, fp16; CPU also fp32, fp64 | CUDA one call, CPU one each  |
| fa2       | sm80 and newer | bf16, fp16     | one call; only on request, torch has the same |
| reference | anywhere       | any            | one each, chunked                             |

A call has at most 65,535 documents and 2^31 elements (`calls`); key/value heads may be shared by any number of query heads. All
but fa3 and cudnn have a deterministic backward. What `auto` takes when, with measurements: docs/attention.md.
"""

import dataclasses
import functools
from types import ModuleType

import torch
from torch import Tensor

from megacp.kernels.attention import calls, cudnn, fa2, fa3, fa4, probe, reference, torch_flash
from megacp.kernels.attention.documents import Documents
from megacp.kernels.attention.stub import STUBS, Stub

BACKENDS: dict[str, ModuleType] = {"fa4": fa4, "fa3": fa3, "cudnn": cudnn, "torch": torch_flash, "fa2": fa2,
                                   "reference": reference}
AUTO_ORDER = ("fa4", "fa3", "cudnn", "torch", "reference")

# cuDNN saves about 20 ms over torch's FlashAttention-2 on a document of 128K tokens and 1 ms on one of 32K, per head and layer
# and step, but spends tens of milliseconds on a plan for each new length. Root mean square length in tokens from which it pays.
CUDNN_DOCUMENT_TOKENS = 32768


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """The backend to pass to attention_forward and attention_backward, and why it was taken."""

    name: str
    reason: str


def select_backend(requested: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, q_heads: int, kv_heads: int,
                   documents: Documents, query_chunks: bool = False, deterministic: bool = False) -> BackendChoice:
    """The requested backend if it can serve, or for "auto" the fastest that can.

    `query_chunks`: it will be given queries of the last tokens of a stream only. `deterministic`: its backward must give the same
    bits for the same inputs (every forward does).

    Rehearsals ask for "stub-fa4" or another of `STUBS`, or for "stub", the memory of the fastest GPU kernel that would serve (on
    a CPU: fa4). Raises ValueError that names --attention-backend, why it cannot serve, and those that can.
    """
    device = torch.device(device)
    if requested.startswith("stub"):
        return _select_stub(requested, device, dtype, head_dim, q_heads, kv_heads, documents, query_chunks, deterministic)
    if q_heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, q_heads + 1) if q_heads % n == 0)
        raise ValueError(f"--num-query-groups {kv_heads} does not divide --num-attention-heads {q_heads}; {divisors} do")
    if requested != "auto" and requested not in BACKENDS:
        raise ValueError(f"--attention-backend {requested} is unknown; auto, {', '.join(BACKENDS)} are known")
    setting = f"{probe.device_name(device)}, {str(dtype).removeprefix('torch.')}, head dim {head_dim}"
    refusal = functools.partial(_refusal, device=device, dtype=dtype, head_dim=head_dim, documents=documents,
                                query_chunks=query_chunks, deterministic=deterministic)
    if requested != "auto":
        refused = refusal(requested)
        if refused:
            accepted = [name for name in BACKENDS if not refusal(name)]
            raise ValueError(f"--attention-backend {requested} cannot serve ({setting}): {refused};"
                             f" auto or {', '.join(accepted)} can")
        return BackendChoice(requested, f"{requested}: asked for ({setting})")
    passed_over = []
    for name in AUTO_ORDER:
        refused = refusal(name) or _too_slow(name, documents)
        if refused is None:
            reason = f"{name}: the fastest that serves {setting}"
            return BackendChoice(name, "; ".join([reason, *passed_over]))
        passed_over.append(f"not {name}: {refused}")
    raise ValueError(f"--attention-backend auto finds none for {setting}: {'; '.join(passed_over)}")


def attention_forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float,
                      backend: str) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, causal inside each document; query head h reads key/value head h // (H / K).

    Returns o_SHD in the dtype of q and lse_HS, the natural logarithm of each row's sum of exponentials, fp32 (float64 for
    float64 inputs). Inputs may be views with any strides over tokens and heads; the last dimension is contiguous. q may be
    the last tokens of the stream only, from anywhere in its first document on; `documents` are the borders of k and v.
    """
    _check(q_SHD, k_SKD, v_SKD, documents)
    return _module(backend).forward(q_SHD, k_SKD, v_SKD, documents, scale)


def attention_backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor,
                       documents: Documents, scale: float, backend: str,
                       deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_SHD, dk_SKD, dv_SKD) of the same, from the output and lse that the forward returned (by any backend).

    `deterministic`: the same bits for the same inputs; of a backend that was selected so.
    """
    _check(q_SHD, k_SKD, v_SKD, documents)
    if do_SHD.shape != q_SHD.shape or o_SHD.shape != q_SHD.shape or lse_HS.shape != (q_SHD.shape[1], q_SHD.shape[0]):
        raise ValueError(f"attention backward: do {list(do_SHD.shape)}, o {list(o_SHD.shape)} and lse {list(lse_HS.shape)} do"
                         f" not fit q {list(q_SHD.shape)}; do and o have the shape of q, lse is [heads, tokens]")
    return _module(backend).backward(do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale, deterministic)


def _module(backend: str) -> ModuleType | Stub:
    return STUBS[backend] if backend in STUBS else BACKENDS[backend]


def _select_stub(requested: str, device: torch.device, *setting) -> BackendChoice:
    if requested == "stub":
        imitated = select_backend("auto", device, *setting).name if device.type == "cuda" else "fa4"
        requested = f"stub-{imitated}"
    if requested not in STUBS:
        raise ValueError(f"--attention-backend {requested.removeprefix('stub-')} has no stub for --rehearse-attention stub;"
                         f" {', '.join(name.removeprefix('stub-') for name in STUBS)} have one")
    return BackendChoice(requested, f"{requested}: allocates what that kernel allocates, computes nothing")


def _refusal(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, documents: Documents, query_chunks: bool,
             deterministic: bool) -> str | None:
    if query_chunks and name == "cudnn":
        return "its causal mask begins at the first key, so it cannot serve --upipe-query-chunk"
    refused = BACKENDS[name].refusal(device, dtype, head_dim, deterministic)
    if refused is None and device.type == "cuda" and name != "reference":
        return calls.offset_refusal(documents, head_dim)
    return refused


def _too_slow(name: str, documents: Documents) -> str | None:
    """Why auto passes over a backend that could serve."""
    if name == "cudnn" and documents.sum_squares < CUDNN_DOCUMENT_TOKENS**2 * len(documents):
        return f"{len(documents)} documents in {documents.total} tokens are too many and short for one call each"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> None:
    fits = q.dim() == 3 and k.dim() == 3 and k.shape == v.shape and q.shape[0] <= k.shape[0] and q.shape[2] == k.shape[2]
    if not fits or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention takes q [S, H, D] and k, v [S, K, D] with K dividing H, q no longer than k, not"
                         f" {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    if k.shape[0] != documents.total:
        raise ValueError(f"documents of {documents.total} tokens do not fit a stream of {k.shape[0]} tokens")
    if k.shape[0] - q.shape[0] >= documents.cu_seqlens[1]:
        raise ValueError(f"the queries are the last {q.shape[0]} of {k.shape[0]} tokens, past the first document's end"
                         f" {documents.cu_seqlens[1]}; leave out the keys that none of them sees")
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise ValueError(f"attention needs the head dim contiguous; its strides are {q.stride(-1)}, {k.stride(-1)} and"
                         f" {v.stride(-1)} in q, k and v, call contiguous() first")
