"""Time of collectives by message size, over groups of some of the job's ranks.

    timing = measure(all_to_all, size=2**28, group=group, device=device, warmup=3, repeats=20)
    timing.bytes_per_rank, timing.seconds, timing.bus_bytes_per_s                   # 268435456, 0.0009, 2.6e11 on 8 ranks

`bytes_per_rank` is the larger of a rank's two buffers: what it hands over in an all-to-all and a reduce-scatter, its own block
included, and what it has in the end of an all-gather. Bus bandwidth is nccl-tests': bytes per rank · (g - 1) / g / seconds, what a
rank sends to others, and gets from them, in a second.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DTYPE = torch.bfloat16
# Their names from torch 2.13 on, and before.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(whole: Tensor, other: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(other, whole, group=group)


def all_gather(whole: Tensor, other: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    gather(whole, shard, group=group)


def reduce_scatter(whole: Tensor, other: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    scatter(shard, whole, group=group)


COLLECTIVES = {"all_to_all": all_to_all, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


@dataclass(frozen=True)
class Timing:
    bytes_per_rank: int
    seconds: float  # the median, of the slowest rank of the job
    gpus: int

    @property
    def bus_bytes_per_s(self) -> float:
        return self.bytes_per_rank * (self.gpus - 1) / self.gpus / self.seconds


def measure(collective: Callable, size: int, group: dist.ProcessGroup, device: torch.device, warmup: int, repeats: int) -> Timing:
    """By every rank of the job, each with its own group, all of which are at it at once. `size`: bytes, rounded to whole shards."""
    gpus = dist.get_world_size(group)
    shard = torch.zeros(size // DTYPE.itemsize // gpus, dtype=DTYPE, device=device)
    whole = torch.zeros(gpus * shard.numel(), dtype=DTYPE, device=device)
    other = torch.empty_like(whole) if collective is all_to_all else whole
    for _ in range(warmup):
        collective(whole, other, shard, group)
    times = _cuda_seconds if device.type == "cuda" else _host_seconds
    median = torch.tensor([statistics.median(times(lambda: collective(whole, other, shard, group), repeats))], device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return Timing(whole.nbytes, median.item(), gpus)


def _cuda_seconds(call: Callable[[], None], repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1000 for start, stop in events]


def _host_seconds(call: Callable[[], None], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds
