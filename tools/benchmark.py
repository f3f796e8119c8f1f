#!/usr/bin/env python3
"""Measure speed and memory on one GPU: a decoder layer of one rank of N, attention kernels, the output head, a whole rank.

    python tools/benchmark.py layer --model llama3-8b --ranks 8 --seq-length 128K 512K 1M --heads-per-stage 8 16 a2a \\
        --activation-memory host lean --out results

    python tools/benchmark.py layer --model llama3-8b --ranks 8 --seq-length 5M --heads-per-stage 8 --activation-memory lean \\
        --warmup 0 --repeats 1 --no-profile --out results                                # minutes a repetition

    python tools/benchmark.py attention --seq-length 16K 128K 1M --heads 1:1 4:1 --documents 1 8 1K --time-budget-s 300 \\
        --out results
    python tools/benchmark.py head --model llama3-8b --tokens 16K 128K --out results
    python tools/benchmark.py rank --model llama3-8b --num-layers 4 --ranks 8 --seq-length 128K --out results
    python tools/benchmark.py plot results/layer.json before/layer.json --output compared.png

    python tools/benchmark.py layer --model llama-tiny --ranks 4 --seq-length 2K --mlp-tile-size 256       # a CPU, to see it work

Collectives are copies within the device, so figures are those of a rank that never waits for another. A rate is the median of
--repeats runs after --warmup; GPU memory is what PyTorch's allocator had handed out. Rows go to the console and, complete after
every row, to files in --out; the picture comes at the end. `MODE --help` lists the flags, docs/performance.md says what is counted
how.
"""

import argparse
import sys

from megacp.argument_checks import ArgumentError
from megacp.arguments import HelpFormatter
from megacp.benchmark import attention_mode, head_mode, layer_mode, plot_mode, rank_mode
from megacp.benchmark.session import add_common_flags, open_session

MEASURING = {"layer": layer_mode, "attention": attention_mode, "head": head_mode, "rank": rank_mode}


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.mode == "plot":
            plot_mode.run(args)
            return 0
        mode = MEASURING[args.mode]
        mode.cases(args)  # refuses bad flags before anything is measured
        session = open_session(args)
        try:
            mode.run(session)
        finally:
            session.draw(args.mode)
    except (ArgumentError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; {args.out} has all rows measured" if getattr(args, "out", None) else ""
        print(f"benchmark: interrupted{kept}", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    options = dict(formatter_class=HelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(description=__doc__, **options)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for name, mode in (MEASURING | {"plot": plot_mode}).items():
        summary = mode.__doc__.splitlines()[0].split(": ", 1)[1]
        mode_parser = modes.add_parser(name, help=summary, description=mode.__doc__, **options)
        if name in MEASURING:
            add_common_flags(mode_parser)
        mode.add_flags(mode_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
