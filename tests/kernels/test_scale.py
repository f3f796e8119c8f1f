"""A tensor times a scalar on the device, with and without Triton."""

import pytest
import torch

from megacp.kernels.scale import scale_
from tests.kernels.rounding import assert_rounded_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_scaled_in_place(factor):
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    result = scale_(x, torch.tensor(factor, device=DEVICE))
    assert result is x
    assert x.flatten().tolist() == [factor * value for value in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 4096, 3 * 4096 * 40 + 5])  # more blocks than programs
def test_the_triton_kernel_scales_every_element_once(elements, dtype):
    pytest.importorskip("triton")
    from megacp.kernels.scale_triton import scale_triton_

    x = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    factor = torch.tensor(1.7, device=DEVICE)
    expected = x.double() * factor.double()
    assert_rounded_once(scale_triton_(x, factor), expected)


def test_the_triton_kernel_leaves_a_tensor_alone_for_a_factor_of_one():
    """Signalling values would come out of a multiplication changed: these bits stay."""
    pytest.importorskip("triton")
    from megacp.kernels.scale_triton import scale_triton_

    bits = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32, device=DEVICE)  # a signalling nan, 1.0
    x = bits.clone().view(torch.float32)
    scale_triton_(x, torch.tensor(1.0, device=DEVICE))
    assert torch.equal(x.view(torch.int32), bits)
