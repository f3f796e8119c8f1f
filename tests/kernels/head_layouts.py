"""Cases of `head_layout` and what they must give: float64, complex rotation, a loop over blocks, autograd for the way back."""

from typing import NamedTuple

import torch

from megacp.kernels.rotary import inverse_frequencies, rotary_cos_sin


class Case(NamedTuple):
    tokens: int
    groups: int
    copies: int
    heads: int  # of a group
    head_dim: int
    rotate: bool
    norm: bool


SIZES = ((1, 1, 1, 1, 2), (37, 4, 1, 3, 6), (70, 1, 4, 1, 128), (19, 3, 2, 5, 80), (5, 2, 2, 1, 256))
CASES = [Case(*size, rotate, norm) for size in SIZES for rotate in (True, False) for norm in (True, False)]
EPS = 1e-3


class Tensors(NamedTuple):
    y_to: torch.Tensor
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    norm_D: torch.Tensor | None
    dx_CtnD: torch.Tensor  # a view into the tokens of a longer tensor


def tensors(case: Case, dtype: torch.dtype, device: str = "cpu") -> Tensors:
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    positions = torch.arange(case.tokens, device=device) + 5_000_000
    frequencies = inverse_frequencies(case.head_dim, 1e4, device=device)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    y_to = random(case.tokens, case.groups * case.heads * case.head_dim)
    cos_sin = rotary_cos_sin(positions, frequencies, 1.2, working) if case.rotate else None
    dx_CTnD = random(case.groups * case.copies, case.tokens + 9, case.heads, case.head_dim)
    return Tensors(y_to, cos_sin, random(case.head_dim) if case.norm else None, dx_CTnD[:, 4 : 4 + case.tokens])


def expected(case: Case, given: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(packed_CtnD, dy_to, dnorm_D) in float64."""
    y_to = given.y_to.double().requires_grad_()
    norm_D = given.norm_D.double().requires_grad_() if case.norm else None
    x = y_to.view(case.tokens, case.groups, case.heads, case.head_dim)
    if case.norm:
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) / case.head_dim + EPS) * norm_D
    if case.rotate:
        half = case.head_dim // 2
        turn = torch.complex(*(part.double() for part in given.cos_sin))[:, None, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        x = torch.cat([turned.real, turned.imag], dim=-1)
    packed_CtnD = torch.stack([x[:, block // case.copies] for block in range(case.groups * case.copies)])
    (packed_CtnD * given.dx_CtnD.double()).sum().backward()
    return packed_CtnD.detach(), y_to.grad, norm_D.grad if case.norm else None


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    assert ours.shape == exact.shape
    return ((ours.double() - exact).norm() / exact.norm()).item()
