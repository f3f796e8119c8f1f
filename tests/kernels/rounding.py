"""How near to the exact value a kernel must come that computes in fp32 and rounds its result once.

    |ours - exact| <= one unit in the last place of ours + FP32_ERROR * size of the terms that were added

Rounding to nearest would be half a unit, but Triton's interpreter cuts bf16 off instead. A difference of large terms has the fp32
error of those terms, whatever is left: so the caller says how large they are.
"""

import torch

UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # relative
FP32_ERROR = 2e-6  # some 30 roundings of 2^-24: an exponential with its argument, sums of thousands of terms taken as a tree
SMALLEST = 2.0**-24  # fp16 holds no smaller number


def assert_rounded_once(ours, exact, terms=None):
    """`exact` in float64; `terms`: size of the terms of each element, a number or a tensor that broadcasts, |exact| when None."""
    terms = exact.abs() if terms is None else terms
    allowed = UNIT[ours.dtype] * exact.abs() + FP32_ERROR * terms + SMALLEST
    excess = (ours.double() - exact).abs() / allowed
    worst = excess.argmax().item()
    assert (excess <= 1).all(), (
        f"element {worst} is {ours.flatten()[worst].item()}, not {exact.flatten()[worst].item()}:"
        f" {excess.max().item():.2f} times the error that one rounding to {ours.dtype} leaves"
    )
