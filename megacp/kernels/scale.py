"""A tensor times a scalar that is 1 nearly always, where only the device knows.

    scale_(torch.tensor([1.0, 2.0]), torch.tensor(3.0))        tensor([3., 6.]), in place

The gradient of a loss that `backward()` begins with is a tensor of 1 in the GPU's memory. To ask for it would make the host wait for
the GPU, and to multiply by it moves the tensor twice: Llama3-8B's gradient of the lm_head, fp32, is 1.96 GiB.
"""

from torch import Tensor

from megacp.kernels.triton_support import serves


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """`x *= factor` in place, `factor` a tensor of one element. On a GPU nothing of a contiguous `x` is read where it is 1."""
    if serves(x, factor) and x.is_contiguous():
        from megacp.kernels.scale_triton import scale_triton_

        return scale_triton_(x, factor)
    return x.mul_(factor)
