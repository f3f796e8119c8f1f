"""The mode `plot`: draws the JSON of one run, or of several of a mode together."""

import argparse
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.benchmark.picture import draw

FORMATS = (".png", ".svg", ".pdf")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON that runs of one mode left in their --out")
    parser.add_argument("--output", type=Path, metavar="FILE", help=".png, .svg or .pdf (default: the first FILE with .png)")


def run(args: argparse.Namespace) -> None:
    output = args.output or args.files[0].with_suffix(".png")
    if output.suffix not in FORMATS:
        raise ArgumentError(f"--output {output} does not end in {', '.join(FORMATS)}; {output.with_suffix('.png')} works")
    draw(args.files, output)
    print(f"wrote {output}")
