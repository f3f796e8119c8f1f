#!/usr/bin/env python3
"""Measure speed and memory on one GPU: a decoder layer of one rank of N, attention kernels, the output head, a whole rank.

    python tools/benchmark.py layer --model llama3-8b --ranks 8 --seq-length 128K 512K 1M --heads-per-stage 8 16 a2a \\
        --activation-memory host lean --out results

    python tools/benchmark.py layer --model llama3-8b --ranks 8 --seq-length 5M --heads-per-stage 8 --activation-memory lean \\
        --warmup 0 --repeats 1 --out results                                          # minutes a row

    python tools/benchmark.py layer --model llama-tiny --ranks 4 --seq-length 2K --mlp-tile-size 256       # a CPU, to see it work

Collectives are copies within the device, so figures are those of a rank that never waits for another. A rate is the median of
--repeats runs after --warmup; GPU memory is what PyTorch's allocator had handed out. Rows are on the console and, complete after every
row, in files of --out. docs/performance.md says what is counted how.
"""

import argparse
import sys

from megacp.argument_checks import ArgumentError
from megacp.arguments import HelpFormatter
from megacp.benchmark import layer_mode
from megacp.benchmark.session import add_common_flags, open_session

MODES = {"layer": layer_mode}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for name, mode in MODES.items():
        summary = mode.__doc__.strip().splitlines()[0]
        mode_parser = modes.add_parser(name, help=summary, description=mode.__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
        mode.add_flags(mode_parser)
        add_common_flags(mode_parser)
    args = parser.parse_args(argv)
    mode = MODES[args.mode]
    try:
        mode.cases(args)
        mode.run(open_session(args))
    except (ArgumentError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
