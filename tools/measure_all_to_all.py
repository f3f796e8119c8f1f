"""Measure what the links between GPUs give: all-to-all, all-gather and reduce-scatter by message size.

    torchrun --standalone --nproc-per-node 8 tools/measure_all_to_all.py --output all_to_all.json
    torchrun --standalone --nproc-per-node 8 tools/measure_all_to_all.py --gpus 2 4 8 --sizes 1M 64M 1G --output all_to_all.json
    python tools/plan_memory.py --model llama3-8b --seq-length 1048576 --gpus 8 --gpu H200 --calibrate all_to_all.json

    8 x NVIDIA H200, bf16, medians of 20
    collective       GPUs  MiB a rank          µs   GB/s bus
    all_to_all          8        0.25        38.1       6.02
    …

GB/s (of 10^9) are nccl-tests' bus bandwidth: bytes a rank · (g - 1) / g / time. Bytes a rank are all that one hands over, its own
block included; of an all-gather what it has in the end; they are rounded down to as many numbers for each rank of a group, at least
one. With --gpus 2 the ranks pair up and all pairs are at it at once. On CPUs, with gloo, it runs to see that it works.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT, COUNT_OR_ZERO
from megacp.benchmark.collectives import COLLECTIVES, DTYPE, Timing, measure
from megacp.benchmark.environment import describe
from megacp.training.host_states import available_host_bytes
from megacp.training.initialize import launched_rank, launched_world_size, select_device
from megacp.training.path_checks import check_file

SIZES = ("256K", "1M", "4M", "16M", "64M", "256M", "1G")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
TIMEOUT = timedelta(minutes=2)
BUFFERS = 3  # of the larger size, at the most that a collective takes: what goes out, what comes in, and a shard
UNKNOWN = 2**62  # bytes that are free where Linux does not say
SHARE = 0.9  # of the free memory; the rest is for NCCL's own buffers, or gloo's


def byte_count(text: str) -> int:
    """`256K` is 262144.

    >>> byte_count("256K")
    262144
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; 256K, 64M or 1G are")
    return int(match[1]) * UNITS[match[2]]


def as_typed(size: int) -> str:
    """The largest power of two up to `size`, as --sizes takes it.

    >>> as_typed(2**18 + 5), as_typed(1000)
    ('256K', '512')
    """
    power = 1 << (size.bit_length() - 1)
    unit = max((unit for unit in UNITS if UNITS[unit] <= power), key=UNITS.get)
    return f"{power // UNITS[unit]}{unit}"


def whole_shards(sizes: list[int], gpus: int) -> list[int]:
    """Each of the sizes once, as bytes of whole shards; none is empty.

    >>> whole_shards([3, 4, 4097, 4096], gpus=2)
    [4, 4096]
    """
    step = DTYPE.itemsize * gpus
    return list(dict.fromkeys(max(1, size // step) * step for size in sizes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="torchrun --standalone --nproc-per-node GPUS tools/measure_all_to_all.py [flags]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--sizes", type=byte_count, nargs="+", default=[byte_count(size) for size in SIZES], metavar="BYTES",
        help=f"a rank's larger buffer (default: {' '.join(SIZES)})")  # fmt: skip
    parser.add_argument("--gpus", type=COUNT, nargs="+", metavar="G", help="GPUs of a group; each divides the ranks (default: all)")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="which (default: all three)")
    parser.add_argument("--warmup", type=COUNT_OR_ZERO, default=3, metavar="N", help="runs before those that count")
    parser.add_argument("--repeats", type=COUNT, default=20, metavar="N", help="runs whose median is told (default: 20)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda when there is one")
    parser.add_argument("--output", metavar="FILE", help="JSON for tools/plan_memory.py --calibrate")
    args = parser.parse_args(argv)
    ranks, first = launched_world_size(), launched_rank() == 0
    try:
        _check(args, ranks, first)
        device = select_device(args.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        _check_memory(max(args.sizes), device)
    except ValueError as error:
        if first:
            print(f"measure_all_to_all: {error}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 2
    first = dist.get_rank() == 0
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if first:
        print(f"{ranks} x {gpu}, bf16, medians of {args.repeats}\n{HEAD}", flush=True)
    timings: dict[str, list[Timing]] = {name: [] for name in args.collectives}
    for gpus in dict.fromkeys(args.gpus or [ranks]):
        group, _ = dist.new_subgroups(gpus, timeout=TIMEOUT)
        for name in timings:
            for size in whole_shards(args.sizes, gpus):
                timing = measure(COLLECTIVES[name], size, group, device, args.warmup, args.repeats)
                timings[name].append(timing)
                if first:
                    print(row(name, timing), flush=True)
    if first and args.output:
        found = {name: [dataclasses.asdict(timing) for timing in rows] for name, rows in timings.items()}
        found |= {"device": gpu, "environment": describe(device, None)}
        Path(args.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0


def _check(args: argparse.Namespace, ranks: int, first: bool) -> None:
    """Raises ArgumentError for what would fail only once all is measured, too. The `first` rank makes the folder of --output."""
    if ranks < 2:
        raise ArgumentError(f"{ranks} rank has none to exchange with; torchrun --standalone --nproc-per-node 2 works")
    for gpus in args.gpus or []:
        if gpus < 2 or ranks % gpus:
            works = " or ".join(str(size) for size in range(2, ranks + 1) if ranks % size == 0)
            raise ArgumentError(f"--gpus {gpus} is not a part of the {ranks} ranks with 2 or more; {works} works")
    if args.output is not None:
        path = Path(args.output)
        try:
            check_file("--output", path, "all_to_all.json")
            if first:
                _try_to_write(path)
        except OSError as error:
            raise ArgumentError(f"--output {path} cannot be written ({error.strerror}); all_to_all.json works") from None


def _try_to_write(path: Path) -> None:
    """Some places refuse only those who try: the kernel's file systems."""
    there = path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    if not there:
        path.unlink()


def _check_memory(size: int, device: torch.device) -> None:
    """Raises ArgumentError, on all ranks alike, when a collective of `size` bytes would not fit beside what is taken already."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        of_node = available_host_bytes()
        free = UNKNOWN if of_node is None else of_node // int(os.environ.get("LOCAL_WORLD_SIZE", launched_world_size()))
    least = torch.tensor([free], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    most = int(SHARE * least.item()) // BUFFERS
    if size > most:
        free = f"{least.item() / 2**30:.2f} GiB that are free for a rank"
        raise ArgumentError(f"--sizes: {size / 2**30:.2f} GiB do not fit {BUFFERS} times in the {free}; {as_typed(most)} works")


HEAD = f"{'collective':15}{'GPUs':>6}{'MiB a rank':>12}{'µs':>12}{'GB/s bus':>11}"


def row(name: str, timing: Timing) -> str:
    size = timing.bytes_per_rank / 2**20
    return f"{name:15}{timing.gpus:6}{size:12.2f}{1e6 * timing.seconds:12.1f}{timing.bus_bytes_per_s / 1e9:11.2f}"


if __name__ == "__main__":
    sys.exit(main())
