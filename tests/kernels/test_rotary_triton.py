"""The Triton kernel of cos and sin: compiled on a GPU, interpreted elsewhere, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from megacp.kernels.rotary import inverse_frequencies, rotary_cos_sin  # noqa: E402
from megacp.kernels.rotary_triton import rotary_cos_sin_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens, head_dim", [(1, 2), (37, 6), (70, 128), (5, 256)])
@pytest.mark.parametrize("factor", [1.0, 1.4852030263919618])
def test_cos_and_sin_are_rounded_once_at_ten_million(tokens, head_dim, factor):
    positions = torch.arange(10_000_000, 10_000_000 - 3 * tokens, -1, device=DEVICE)[::3]  # a strided view
    frequencies = inverse_frequencies(head_dim, 5e5, device=DEVICE)
    cos, sin = (torch.full((tokens, head_dim // 2), 7.0, device=DEVICE) for _ in range(2))
    rotary_cos_sin_triton(positions, frequencies, cos, sin, factor)
    for ours, exact in zip((cos, sin), rotary_cos_sin(positions, frequencies, factor, torch.float64)):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-24, atol=1e-9)  # half of the last of 24 bits, float64's angle
