"""Attention the plainest way, in float64: a dense mask, one softmax, gradients by autograd. The judge of every backend."""

import torch


def naive_attention(q_SHD, k_SKD, v_SKD, cu_seqlens, scale, do_SHD=None):
    """(o_SHD, lse_HS, dq, dk, dv) in float64; the gradients are None without do."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q_SHD, k_SKD, v_SKD))
    group = q.shape[1] // k.shape[1]
    k_SHD, v_SHD = (torch.stack([t[:, head // group] for head in range(q.shape[1])], dim=1) for t in (k, v))
    position = torch.arange(q.shape[0], device=q.device)
    document = torch.bucketize(position, torch.tensor(cu_seqlens[1:], device=q.device), right=True)
    visible = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    scores = torch.einsum("qhd,khd->hqk", q, k_SHD) * scale
    scores = torch.where(visible, scores, torch.full_like(scores, float("-inf")))
    o = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v_SHD)
    lse = torch.logsumexp(scores, -1)
    if do_SHD is None:
        return o.detach(), lse.detach(), None, None, None
    gradients = torch.autograd.grad(o, (q, k, v), do_SHD.double())
    return o.detach(), lse.detach(), *gradients


def random_inputs(total, heads, kv_heads, head_dim, dtype, seed=0, device="cpu"):
    """(q_SHD, k_SKD, v_SKD, do_SHD), drawn in float64 and rounded once, so that every dtype sees nearly the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(total, n, head_dim, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
                 for n in (heads, kv_heads, kv_heads, heads))


def relative_error(ours, exact, floor=0.0):
    """Norm of the error over the norm of the exact result, or over `floor` when the exact result is smaller."""
    return ((ours.double() - exact).norm() / max(exact.norm().item(), floor)).item()
