"""The one rule for the precision inside a kernel: fp32 for bf16, fp16 and fp32 inputs, float64 for float64 inputs.

    compute_dtype(torch.bfloat16) is torch.float32;  compute_dtype(torch.float64) is torch.float64

A float64 run of the whole model is therefore float64 throughout, which is what the parity tests compare with.
"""

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, softmax and accumulation for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
