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
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacp.kernels.attention import calls
from megacp.kernels.attention.documents import Documents

BLOCK = 128  # tokens


@dataclass(frozen=True)
class Stub:
    """The memory of one kernel. `rows`: fp32 numbers per query and head."""

    rows: int
    sums_kv_in_fp32: bool  # with shared KV heads; else the gradient of each query head's own copy

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Serves everywhere."""
        return None

    def forward(self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
        return calls.forward_in_calls(self._forward, q_SHD, k_SKD, v_SKD, documents, scale)

    def backward(self, do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor,
                 documents: Documents, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return calls.backward_in_calls(self._backward, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)

    def _forward(self, q_SHD, k_SKD, v_SKD, documents, scale):
        queries, heads, _ = q_SHD.shape
        o_SHD = _zeros_like(q_SHD)
        lse_HS = torch.zeros(heads, queries, dtype=torch.float32, device=q_SHD.device)
        return o_SHD, lse_HS

    def _backward(self, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale):
        (queries, heads, head_dim), (keys, kv_heads, _) = q_SHD.shape, k_SKD.shape
        dq_SHD = _zeros_like(q_SHD)
        dk_SKD, dv_SKD = _zeros_like(k_SKD), _zeros_like(v_SKD)

        def workspace(tokens: int, *widths: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(_in_blocks(tokens, documents), *widths, dtype=dtype, device=q_SHD.device)

        held = [workspace(queries, heads, head_dim), *(workspace(queries, heads) for _ in range(self.rows))]
        if heads > kv_heads and self.sums_kv_in_fp32:
            held += [workspace(keys, kv_heads, head_dim) for _ in "kv"]
        elif heads > kv_heads:
            held += [workspace(keys, heads, head_dim, dtype=k_SKD.dtype) for _ in "kv"]
        del held
        return dq_SHD, dk_SKD, dv_SKD


STUBS = {
    "stub-fa4": Stub(rows=2, sums_kv_in_fp32=True),
    "stub-fa3": Stub(rows=2, sums_kv_in_fp32=True),
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
