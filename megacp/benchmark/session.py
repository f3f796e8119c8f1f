"""What all modes share: their common flags, the device, the ceilings, the loop over cases.

    add_common_flags(parser)
    session = open_session(args)                 # measures the ceilings and prints where the figures come from
    runner = session.runner("layer", COLUMNS)
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT, COUNT_OR_ZERO, POSITIVE
from megacp.benchmark.ceilings import Ceilings, measure_ceilings
from megacp.benchmark.environment import describe
from megacp.benchmark.picture import draw
from megacp.benchmark.report import Column, Report
from megacp.benchmark.runner import Runner
from megacp.model.config import ModelConfig, preset
from megacp.training.initialize import select_device
from megacp.training.path_checks import check_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPECTED_SHARE = 0.3  # of the matmul ceiling, to guess how long the first case takes


@dataclass(frozen=True)
class Session:
    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings
    environment: dict
    start: float  # as time.monotonic

    def runner(self, name: str, columns: list[Column]) -> Runner:
        report = Report(name, columns, self.environment, self.ceilings, self.args.out)
        return Runner(report, EXPECTED_SHARE * self.ceilings.matmul, self.args.time_budget_s, self.start)

    def draw(self, name: str) -> None:
        """MODE.png from MODE.json, if there is something to draw."""
        file = None if self.args.out is None else Path(self.args.out) / f"{name}.json"
        if file is None or not file.exists():
            return
        try:
            draw([file], file.with_suffix(".png"))
            print(f"wrote {file.with_suffix('.png')} and, beside it, JSON and CSV")
        except (ArgumentError, ImportError) as error:  # no figures, or no matplotlib: the rows are there all the same
            print(f"no picture: {error}")


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("all modes")
    add = group.add_argument
    add("--repeats", type=COUNT, default=3, metavar="N", help="timed repetitions of a row; the median counts")
    add("--warmup", type=COUNT_OR_ZERO, default=1, metavar="N", help="repetitions before them; 0 for rows of minutes")
    add("--time-budget-s", type=POSITIVE, metavar="S",
        help="leave out rows that would end later than so many seconds from the start")  # fmt: skip
    add("--out", metavar="DIR", help="folder of MODE.csv, MODE.json and MODE.png (default: console only)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda when there is one")
    add("--dtype", choices=tuple(DTYPES), help="compute precision (default: bf16 on cuda, fp32 on cpu)")
    add("--seed", type=COUNT_OR_ZERO, default=1234, metavar="N", help="of the random numbers")
    add("--commit", metavar="HASH", help="what the figures belong to, where the folder is no git checkout")


def open_session(args: argparse.Namespace) -> Session:
    """Raises ArgumentError for a --device or an --out that cannot be used."""
    start = time.monotonic()
    if args.out is not None:
        check_folder("--out", Path(args.out))
    try:
        device = select_device(args.device)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    torch.manual_seed(args.seed)
    environment = describe(device, args.commit)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    print(f"{environment['device']}; commit {environment['commit']}; {versions}")
    ceilings = measure_ceilings(device, dtype)
    print(f"ceilings of this run: {ceilings.text()}", flush=True)
    return Session(args, device, dtype, ceilings, environment, start)


def model_named(name: str) -> ModelConfig:
    try:
        return preset(name)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
