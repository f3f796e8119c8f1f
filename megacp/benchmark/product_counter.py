"""Counts the FLOPs of matrix products as they run, on any device, `meta` included: no hand-kept formula for a layer's schedule.

    with ProductCounter() as counter:
        torch.addmm(c_mn, a_mk, b_kn)
    counter.flops                       # 2 * m * n * k

torch.utils.flop_counter leaves out addmm_ and fails at addmm with out_dtype, which the weight gradients use.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Position of its argument.
LEFT_FACTOR = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1}


class ProductCounter(TorchDispatchMode):
    """A context manager; counts what runs in its thread, backward included where that is this thread (not on a GPU)."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        position = LEFT_FACTOR.get(function._overloadpacket)
        if position is not None:
            self.flops += 2 * result.numel() * args[position].shape[-1]
        return result
