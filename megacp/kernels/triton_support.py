"""When the Triton kernels serve, and what they ask of the device. Triton is optional: a CPU needs none.

A public function such as `rms_norm` asks `serves(x, weight)` and hands over to its fast version, or runs the plain-torch reference
beside it. There is no switch: which of the two runs depends on the tensors alone.

    serves(torch.ones(2, device="cuda"))    True where Triton is installed
    serves(torch.ones(2))                   False: a CPU tensor
    serves(torch.ones(2, device="cuda", dtype=torch.float64))    False: the kernels compute in fp32

With TRITON_INTERPRET=1 in the environment before Triton is imported, the functions of the `*_triton` modules, called directly, take
CPU tensors: the tests do so.
"""

import functools
import importlib.util
import itertools

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED_PROCESSORS = 4  # of a device that Triton only interprets: a few programs, so that loops over rows are taken


def serves(*tensors: Tensor) -> bool:
    """Whether kernels that compute in fp32 can take all these tensors: on a GPU, not empty, and Triton is installed."""
    return all(x.is_cuda and x.dtype in DTYPES and x.numel() > 0 for x in tensors) and _triton_is_installed()


def is_predicted(x: Tensor) -> bool:
    """Whether `x` stands for a GPU's: in half precision on the meta device. A function then allocates what its kernel would, no more."""
    return x.device.type == "meta" and x.dtype in (torch.bfloat16, torch.float16)


def are_rows(*tensors: Tensor) -> bool:
    """Whether `x.view(-1, x.shape[-1])` is a matrix of contiguous rows, whatever the stride between rows, for each tensor."""
    return all(x.stride(-1) == 1 and _one_stride_leads(x) for x in tensors)


def processors(x: Tensor) -> int:
    """Streaming multiprocessors of the device of `x`: how many programs run side by side."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED_PROCESSORS


def _one_stride_leads(x: Tensor) -> bool:
    leading = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    return all(outer == inner * size for (_, outer), (size, inner) in itertools.pairwise(leading))


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
