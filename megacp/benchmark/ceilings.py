"""What this device reaches when nothing is in the way: the rates that a row's shares refer to, measured in the same run.

    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    ceilings.matmul             # FLOP/s of one 8192 x 8192 x 8192 product of random numbers (random: zeros draw less power)
    ceilings.device_copy        # bytes/s of a copy within the device's memory, read and written both counted
    ceilings.to_host, ceilings.to_device        # bytes/s of pinned copies, one direction at a time

On a CPU a smaller product in fp32; there are no copies to a host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megacp.benchmark.clock import call_seconds

GPU_SIDE, CPU_SIDE = 8192, 512
COPY_BYTES = 2**30
WARMUP, ROUNDS = 10, 5


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s and bytes/s; None where there is nothing to measure."""

    side: int  # of the square matrices
    dtype: str
    matmul: float
    device_copy: float
    to_host: float | None
    to_device: float | None

    def text(self) -> str:
        """A line for a person."""
        matmul = f"matmul {self.dtype} {self.side}^3 {self.matmul / 1e12:.4g} TFLOP/s"
        parts = [matmul, f"device copy {self.device_copy / 1e12:.3g} TB/s"]
        if self.to_host is not None:
            parts.append(f"pinned copies {self.to_host / 1e9:.3g} GB/s to the host, {self.to_device / 1e9:.3g} GB/s back")
        return "; ".join(parts)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    cuda = device.type == "cuda"
    side = GPU_SIDE if cuda else CPU_SIDE
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    matmul = 2 * side**3 / _seconds(partial(torch.matmul, a, b), device)
    del a, b
    source = torch.empty(COPY_BYTES if cuda else COPY_BYTES // 64, dtype=torch.uint8, device=device).random_()
    device_copy = 2 * source.nbytes / _seconds(source.clone, device)
    to_host = to_device = None
    if cuda:
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        to_host, to_device = (
            source.nbytes / _seconds(partial(to.copy_, from_, non_blocking=True), device)
            for to, from_ in ((host, source), (source, host))
        )
        del source, host
        torch.cuda.empty_cache()
    return Ceilings(side, str(dtype).removeprefix("torch."), matmul, device_copy, to_host, to_device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARMUP):
        call()
    return call_seconds(call, device, ROUNDS)
