"""Attention that computes nothing and allocates what a real kernel allocates: the memory of a step without its hours.

For rehearsals only; --attention-backend does not offer it. `STUBS["stub-fa4"]` has the functions of a backend. Outputs are zeros.

Worked example, one query head on one KV head of 1,048,576 tokens, D = 128, bf16, in MiB: the forward leaves o 256 and lse 4; the
backward of fa4 leaves dq, dk, dv 256 each, after having held 520 more, the fp32 sum of dq (512) and two fp32 rows (8).

What a backward holds besides dq, dk and dv, read from the kernels' sources (S_q queries, S_k keys, H query and K KV heads; tokens
rounded up to a block of 128 per document):

| kernel     | sum of dq        | rows            | with H > K also                      |
|------------|------------------|-----------------|--------------------------------------|
| fa4, fa3   | fp32 [S_q, H, D] | 2 x fp32 [H, S_q] | dk, dv in fp32 [S_k, K, D]         |
| fa2, torch | fp32 [S_q, H, D] | 1 x fp32 [H, S_q] | dk, dv of each query head [S_k, H, D] |
| cudnn      | fp32 [S_q, H, D] | 1 x fp32 [H, S_q] | dk, dv of each query head [S_k, H, D]; its plan may differ |

Deterministic, fa4 and fa3 hold int32 counters beside: [documents, H, blocks of 64 queries (128 up to D = 64) of the longest
document], and with H > K two of [documents, K, blocks of 128 of its keys, 2]. fa2 and torch hold the sum of dq as often as a GPU
has multiprocessors (132 on Hopper) for each head of a document.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megacp.kernels.attention import calls
from megacp.kernels.attention.documents import Documents

BLOCK = 128  # tokens
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class Stub:
    """The memory of one kernel. `rows`: fp32 numbers per query and head."""

    rows: int
    sums_kv_in_fp32: bool  # with shared KV heads; else the gradient of each query head's own copy
    has_turns: bool = False  # deterministic, blocks add to dq in turn; else each to a sum of its own

    def forward(self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
        return calls.forward_in_calls(self._forward, q_SHD, k_SKD, v_SKD, documents, scale)

    def backward(self, do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor,
                 documents: Documents, scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        kernel = functools.partial(self._backward, deterministic=deterministic)
        return calls.backward_in_calls(kernel, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)

    def _forward(self, q_SHD, k_SKD, v_SKD, documents, scale):
        queries, heads, _ = q_SHD.shape
        o_SHD = _zeros_like(q_SHD)
        lse_HS = torch.zeros(heads, queries, dtype=torch.float32, device=q_SHD.device)
        return o_SHD, lse_HS

    def _backward(self, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale, *, deterministic):
        (queries, heads, head_dim), (keys, kv_heads, _) = q_SHD.shape, k_SKD.shape
        dq_SHD = _zeros_like(q_SHD)
        dk_SKD, dv_SKD = _zeros_like(k_SKD), _zeros_like(v_SKD)

        def workspace(tokens: int, *widths: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(_in_blocks(tokens, documents), *widths, dtype=dtype, device=q_SHD.device)

        in_turn = deterministic and self.has_turns
        dq_sums = -(-MULTIPROCESSORS // (len(documents) * heads)) if deterministic and not self.has_turns else 1
        held = [workspace(queries, heads, head_dim) for _ in range(dq_sums)]
        held += [workspace(queries, heads) for _ in range(self.rows)]
        if heads > kv_heads and self.sums_kv_in_fp32:
            held += [workspace(keys, kv_heads, head_dim) for _ in "kv"]
        elif heads > kv_heads:
            held += [workspace(keys, heads, head_dim, dtype=k_SKD.dtype) for _ in "kv"]
        if in_turn:
            longest = documents.max_seqlen

            def counters(heads: int, blocks: int) -> Tensor:
                return torch.empty(len(documents), heads, blocks, dtype=torch.int32, device=q_SHD.device)

            held.append(counters(heads, -(-min(longest, queries) // (64 if head_dim > 64 else 128))))
            held += [counters(kv_heads, 2 * -(-longest // 128)) for _ in "kv" if heads > kv_heads]
        del held
        return dq_SHD, dk_SKD, dv_SKD


STUBS = {
    "stub-fa4": Stub(rows=2, sums_kv_in_fp32=True, has_turns=True),
    "stub-fa3": Stub(rows=2, sums_kv_in_fp32=True, has_turns=True),
    "stub-fa2": Stub(rows=1, sums_kv_in_fp32=False),
    "stub-torch": Stub(rows=1, sums_kv_in_fp32=False),
    "stub-cudnn": Stub(rows=1, sums_kv_in_fp32=False),
}


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _in_blocks(tokens: int, documents: Documents) -> int:
    """Rounded up as kernels do: to a block, with room for a begun one in every document of a packed stream."""
    padding = 0 if len(documents) == 1 else BLOCK * len(documents)
    return -(-(tokens + padding) // BLOCK) * BLOCK
