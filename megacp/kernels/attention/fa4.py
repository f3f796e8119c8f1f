"""FlashAttention-4 (`flash_attn.cute`, package flash-attn-4): the fastest on Hopper and Blackwell, all documents in one call.

Worked example: q_SHD [8, 4, 128], k_SKD [8, 1, 128] and the borders (0, 3, 8) give o_SHD [8, 4, 128] and lse_HS [4, 8].
A stream of one document goes in as a batch of one, [1, S, heads, D], a view.

The first call of a kind compiles for seconds. A kind is, for each direction: the dtype, head dim and query heads per key/value
head; one document, up to 256 or more; a longest document that fits one block of the kernel or not; deterministic or not.

Deterministic, thread blocks wait for their turn at each block of dq (and of dk and dv, with shared key/value heads), by counters
for every block that a document as long as the longest would have: documents x longest / 64 x 4 bytes a head.
"""

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor

from megacp.kernels.attention import calls, probe
from megacp.kernels.attention.documents import Documents

MODULE = "flash_attn.cute.interface"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why this backend cannot serve; None when it can. The limits are those of its interface.py; any group of query heads works."""
    reason = probe.cuda_refusal(device, dtype, head_dim, minimum_capability=(9, 0), maximum_head_dim=256)
    if reason is not None:
        return reason
    generation = probe.compute_capability(device)[0]
    if generation > 12:
        return f"it has no kernels for sm{generation}x"
    if head_dim > 128 and not (generation == 9 or generation in (10, 11) and head_dim == 256):
        return f"head dim {head_dim}: above 128 it takes multiples of 8 up to 256 on sm90, 256 on sm100 and sm110"
    if generation == 9 and head_dim <= 128 and -(-head_dim // 16) % 2:
        # Measured with 4.0.0b36 on an H200, head dims 8 to 256: of these dq, dk and dv are off by their own size, of all others right.
        return f"head dim {head_dim}: its backward on sm90 gives wrong gradients below 128 unless rounded up to 16 it is a multiple of 32"
    if deterministic and generation == 12:
        return "--deterministic: its backward for sm12x has no such mode"
    return probe.import_error(MODULE)


def forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    return calls.forward_in_calls(_forward, q_SHD, k_SKD, v_SKD, documents, scale)


def backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
             scale: float, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    kernel = functools.partial(_backward, deterministic=deterministic)
    return calls.backward_in_calls(kernel, do_SHD, q_SHD, k_SKD, v_SKD, o_SHD, lse_HS, documents, scale)


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents, scale: float) -> tuple[Tensor, Tensor]:
    run = _interface()._flash_attn_fwd
    if len(documents) == 1:
        o, lse, *_ = run(q_SHD[None], k_SKD[None], v_SKD[None], softmax_scale=scale, causal=True, return_lse=True)
        return o[0], lse[0]
    o_SHD, lse_HS, *_ = run(q_SHD, k_SKD, v_SKD, softmax_scale=scale, causal=True, return_lse=True,
                            **documents.kernel_borders(q_SHD))
    return o_SHD, lse_HS


def _backward(do_SHD: Tensor, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_SHD: Tensor, lse_HS: Tensor, documents: Documents,
              scale: float, *, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    run = functools.partial(_interface()._flash_attn_bwd, softmax_scale=scale, causal=True, deterministic=deterministic)
    if len(documents) == 1:
        dq, dk, dv = run(q_SHD[None], k_SKD[None], v_SKD[None], o_SHD[None], do_SHD[None], lse_HS[None])
        return dq[0], dk[0], dv[0]
    return run(q_SHD, k_SKD, v_SKD, o_SHD, do_SHD, lse_HS, **documents.kernel_borders(q_SHD))


@functools.cache
def _interface() -> ModuleType:
    """The package. Its compiler warns at every kernel of an argument, aux_data, that we do not use: nothing a user could act on."""
    warnings.filterwarnings("ignore", r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument", UserWarning)
    return importlib.import_module(MODULE)
