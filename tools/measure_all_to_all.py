"""Measure what the links between GPUs give: all-to-all, all-gather and reduce-scatter by message size.

    torchrun --standalone --nproc-per-node 8 tools/measure_all_to_all.py --output all_to_all.json
    torchrun --standalone --nproc-per-node 8 tools/measure_all_to_all.py --gpus 2 4 8 --sizes 1M 64M 1G --output all_to_all.json
    python tools/plan_memory.py --model llama3-8b --seq-length 1048576 --gpus 8 --gpu H200 --calibrate all_to_all.json

    8 x NVIDIA H200, bf16, medians of 20
    collective       GPUs  MiB a rank          µs   GB/s bus
    all_to_all          8        0.25        38.1       6.02
    …

GB/s (of 10^9) are nccl-tests' bus bandwidth: bytes a rank · (g - 1) / g / time. Bytes a rank are all that one hands over, its own
block included; of an all-gather what it has in the end. With --gpus 2 the ranks pair up and all pairs are at it at once. On CPUs, with
gloo, it runs to see that it works.
"""

import argparse
import dataclasses
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT, COUNT_OR_ZERO
from megacp.benchmark.collectives import COLLECTIVES, Timing, measure
from megacp.benchmark.environment import describe
from megacp.training.initialize import launched_rank, launched_world_size, select_device
from megacp.training.path_checks import check_file

SIZES = ("256K", "1M", "4M", "16M", "64M", "256M", "1G")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
TIMEOUT = timedelta(minutes=2)


def byte_count(text: str) -> int:
    """`256K` is 262144.

    >>> byte_count("256K")
    262144
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; 256K, 64M or 1G are")
    return int(match[1]) * UNITS[match[2]]


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
    ranks = launched_world_size()
    try:
        _check(args, ranks)
        device = select_device(args.device)
    except ValueError as error:
        if launched_rank() == 0:
            print(f"measure_all_to_all: {error}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    first = dist.get_rank() == 0
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if first:
        print(f"{ranks} x {gpu}, bf16, medians of {args.repeats}\n{HEAD}", flush=True)
    timings: dict[str, list[Timing]] = {name: [] for name in args.collectives}
    for gpus in args.gpus or [ranks]:
        group, _ = dist.new_subgroups(gpus, timeout=TIMEOUT)
        for name in args.collectives:
            for size in args.sizes:
                timing = measure(COLLECTIVES[name], size, group, device, args.warmup, args.repeats)
                timings[name].append(timing)
                if first:
                    print(row(name, timing), flush=True)
    if first and args.output:
        found = {name: [dataclasses.asdict(timing) for timing in rows] for name, rows in timings.items()}
        found |= {"device": gpu, "environment": describe(device, None)}
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0


def _check(args: argparse.Namespace, ranks: int) -> None:
    """Raises ArgumentError for what would fail only once all is measured, too."""
    if ranks < 2:
        raise ArgumentError(f"{ranks} rank has none to exchange with; torchrun --standalone --nproc-per-node 2 works")
    for gpus in args.gpus or []:
        if gpus < 2 or ranks % gpus:
            works = " or ".join(str(size) for size in range(2, ranks + 1) if ranks % size == 0)
            raise ArgumentError(f"--gpus {gpus} is not a part of the {ranks} ranks with 2 or more; {works} works")
    if args.output is not None:
        check_file("--output", Path(args.output), "all_to_all.json")


HEAD = f"{'collective':15}{'GPUs':>6}{'MiB a rank':>12}{'µs':>12}{'GB/s bus':>11}"


def row(name: str, timing: Timing) -> str:
    size = timing.bytes_per_rank / 2**20
    return f"{name:15}{timing.gpus:6}{size:12.2f}{1e6 * timing.seconds:12.1f}{timing.bus_bytes_per_s / 1e9:11.2f}"


if __name__ == "__main__":
    sys.exit(main())
