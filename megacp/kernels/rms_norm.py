"""Root-mean-square normalisation and its explicit backward (Zhang and Sennrich, arXiv 1910.07467, eq. 4).

    y = w * x / sqrt(mean(x^2) + eps)                     the mean runs over the last dimension

Worked example: x_Td = [[3, 4]], w_d = [1, 2], eps = 0. The mean square is 12.5, so y_Td = [[0.8485, 2.2627]].

The same two functions serve the layer's norms (x_Td, weight [d]) and the q and k norms of Qwen3 (x_tHD, weight [D]).
Statistics are fp32 (float64 for float64 input) and each result is rounded once, to the dtype of x. On a GPU both are one Triton
kernel that reads its inputs once. Temporaries of the reference are a few fp32 copies of x, so long inputs come in tiles of tokens.
"""

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype
from megacp.kernels.triton_support import are_rows, is_predicted, serves

MAX_TRITON_WIDTH = 16384  # a row and its weight gradient stay in registers


def rms_norm(x_Td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x (any leading dimensions) and scale it by the weight; the dtype is that of x."""
    _check_weight(x_Td, weight_d)
    if is_predicted(x_Td):
        return torch.empty_like(x_Td, memory_format=torch.contiguous_format)
    if _triton_serves(x_Td, weight_d):
        from megacp.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x_Td, weight_d, eps)
    return rms_norm_reference(x_Td, weight_d, eps)


def rms_norm_backward(
    dy_Td: Tensor, x_Td: Tensor, weight_d: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients (dx_Td in the dtype of x, dweight_d in fp32, float64 for float64 input).

    With x' = x * r, r = 1 / rms(x) and a = dy * w:  dx = r * (a - x' * mean(a * x')),  dweight = sum over tokens of dy * x'.
    `residual`, of the shape of x, is added to dx before it is rounded: the gradient that comes past the norm. `out`, of the shape
    and dtype of x, receives dx and is returned; it may be `residual` itself.
    """
    _check_weight(x_Td, weight_d)
    for name, tensor in (("dy", dy_Td), ("residual", residual), ("out", out)):
        if tensor is not None and tensor.shape != x_Td.shape:
            raise ValueError(f"RMSNorm backward: {name} of shape {list(tensor.shape)} does not fit x; {list(x_Td.shape)} does")
    if out is not None and out.dtype != x_Td.dtype:
        raise ValueError(f"RMSNorm backward: out is {out.dtype}, but x is {x_Td.dtype}; both must be the same")
    if is_predicted(x_Td):
        dx_Td = torch.empty_like(x_Td, memory_format=torch.contiguous_format) if out is None else out
        return dx_Td, torch.empty_like(weight_d, dtype=torch.float32)
    optional = (tensor for tensor in (residual, out) if tensor is not None)
    if _triton_serves(x_Td, weight_d, dy_Td, *optional):
        from megacp.kernels.rms_norm_triton import rms_norm_backward_triton

        return rms_norm_backward_triton(dy_Td, x_Td, weight_d, eps, residual, out)
    return rms_norm_backward_reference(dy_Td, x_Td, weight_d, eps, residual, out)


def rms_norm_reference(x_Td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    x = x_Td.to(compute_dtype(x_Td.dtype))
    normed = x * _reciprocal_rms(x_Td, eps) if x is x_Td else x.mul_(_reciprocal_rms(x_Td, eps))
    return normed.mul_(weight_d).to(x_Td.dtype)


def rms_norm_backward_reference(
    dy_Td: Tensor, x_Td: Tensor, weight_d: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward` in plain torch."""
    dtype = compute_dtype(x_Td.dtype)
    x, dy = x_Td.to(dtype), dy_Td.to(dtype)
    r = _reciprocal_rms(x_Td, eps)
    normed = x * r
    product = dy * normed
    dweight_d = product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()
    projection = product.mul_(weight_d).mean(-1, keepdim=True)
    dx = (dy * weight_d).sub_(normed.mul_(projection)).mul_(r)
    if residual is not None:
        dx += residual
    return dx.to(x_Td.dtype) if out is None else out.copy_(dx), dweight_d


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """In the compute dtype, without a copy of x in it."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute_dtype(x.dtype))
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _triton_serves(*tensors: Tensor) -> bool:
    return serves(*tensors) and are_rows(*tensors) and tensors[0].shape[-1] <= MAX_TRITON_WIDTH


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"RMSNorm weight of shape {list(weight.shape)} does not fit x of shape {list(x.shape)};"
                         f" [{x.shape[-1]}] does")
