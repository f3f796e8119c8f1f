"""The mode `head`: final norm, lm_head and cross-entropy with their gradients, by tokens of a rank and tile.

The head makes its gradients in the forward pass, so one figure covers both directions. Random labels, none masked.
"""

import argparse
import itertools
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch

from megacp.arguments import COUNT
from megacp.benchmark.clock import seconds_of
from megacp.benchmark.flags import token_count
from megacp.benchmark.kernel_classes import GEMM
from megacp.benchmark.kernel_profile import KernelProfile
from megacp.benchmark.report import Column
from megacp.benchmark.roofline import outside_share, roofline
from megacp.benchmark.session import Session, model_named
from megacp.benchmark.work import head_model_flops
from megacp.kernels.precision import compute_dtype
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.model.output_head import OutputHead
from megacp.training.memory_phases import Gauge, device_gauge

UNIT_TOKENS = 4096  # of the column ms/4K

COLUMNS = [
    Column("model", "model", "", 12), Column("tokens", "tokens", "tokens", 8), Column("loss_tile_size", "tile", "tokens", 6),
    Column("first_s", "first s", ".3f", 9), Column("seconds", "seconds", ".4f", 9), Column("ms_per_4k_tokens", "ms/4K", ".2f", 9),
    Column("tokens_per_s", "tokens/s", ",.0f", 12), Column("model_tflops", "TFLOP/s", ".4g", 8),
    Column("matmul_share", "% matmul", "%", 8), Column("peak_gib", "peak GiB", ".3f", 9),
    Column("added_gib", "added GiB", ".3f", 9), Column("outside_share", "% other", "%", 7),
]  # fmt: skip


@dataclass(frozen=True)
class HeadCase:
    config: ModelConfig
    tokens: int
    tile_size: int

    @property
    def model_flops(self) -> int:
        return head_model_flops(self.config, self.tokens)

    def describe(self) -> dict:
        return {"model": self.config.name, "tokens": self.tokens, "loss_tile_size": self.tile_size}


class HeadBench:
    """The head with random weights, and its input."""

    def __init__(self, case: HeadCase, device: torch.device, dtype: torch.dtype, gauge: Gauge):
        self._case, self._device, self._gauge = case, device, gauge
        config = replace(case.config, untie_embeddings_and_output_weights=True)
        self._head = OutputHead(config, device=device, dtype=dtype)
        for weight in self._head.parameters():
            weight.grad_dtype = compute_dtype(dtype)  # as in training: it is not rounded to the weight's
        with torch.no_grad():
            self._head.norm.fill_(1.0)
            self._head.lm_head.normal_(std=config.init_method_std)
        self._h_Td = torch.empty(case.tokens, config.hidden_size, dtype=dtype, device=device).normal_().requires_grad_()
        self._labels_T = torch.randint(config.vocab_size, (case.tokens,), device=device)

    def run(self, around=None) -> tuple[float, int, int]:
        """Seconds; bytes at the most in all, and above weights and input."""
        base = self._gauge.live_bytes()
        self._gauge.reset_peak()
        if around is None:
            seconds = seconds_of(self._step, self._device)
        else:
            with around("head"):
                seconds = seconds_of(self._step, self._device)
        peak = self._gauge.peak_bytes()
        return seconds, peak, peak - base

    def _step(self) -> None:
        loss = self._head(self._h_Td, self._labels_T, 1 / self._case.tokens, self._case.tile_size)
        (gradient, *_) = torch.autograd.grad(loss, (self._h_Td, *self._head.parameters()))
        self._gradient_sum = gradient.sum()

    def check_finite(self) -> None:
        if not torch.isfinite(self._gradient_sum):
            raise ArithmeticError("the gradient of the head's input is not finite")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("head", "Every combination of what takes several values is a row.")
    add = group.add_argument
    add("--model", default="llama3-8b", metavar="PRESET", help="as of pretrain_llama.py")
    add("--tokens", type=token_count, nargs="+", default=[16384], metavar="TOKENS", help="of the rank: 4K, 128K (default: 16K)")
    add("--loss-tile-size", type=token_count, nargs="+", default=[4096], metavar="TOKENS",
        help="per step of the head (default: 4096)")  # fmt: skip
    add("--vocab-size", type=COUNT, metavar="N", help="instead of the model's")
    add("--no-profile", action="store_false", dest="profile",
        help="without the one repetition more, not timed, whose kernels tell where the time goes")  # fmt: skip


def cases(args: argparse.Namespace) -> list[HeadCase]:
    config = model_named(args.model)
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)
    return [HeadCase(config, *sizes) for sizes in itertools.product(sorted(args.tokens), args.loss_tile_size)]


def run(session: Session) -> None:
    args, runner = session.args, session.runner("head", COLUMNS)
    for case in cases(args):
        repetitions = args.warmup + args.repeats + args.profile
        runner.run(case.describe(), case.model_flops, repetitions, partial(_measure, session, case))


def _measure(session: Session, case: HeadCase) -> tuple[dict, list[dict]]:
    args, ceilings = session.args, session.ceilings
    with device_gauge(session.device) as gauge:
        bench = HeadBench(case, session.device, session.dtype, gauge)
        runs = [bench.run() for _ in range(args.warmup + args.repeats)]
        bench.check_finite()
        profile = KernelProfile(session.device)
        if args.profile:
            bench.run(around=profile)
    seconds = statistics.median(run[0] for run in runs[args.warmup :])
    row = {
        "first_s": runs[0][0],
        "seconds": seconds,
        "ms_per_4k_tokens": 1000 * seconds * UNIT_TOKENS / case.tokens,
        "tokens_per_s": case.tokens / seconds,
        "model_tflops": case.model_flops / seconds / 1e12,
        "matmul_share": case.model_flops / seconds / ceilings.matmul,
        "peak_gib": max(run[1] for run in runs) / GIB,
        "added_gib": max(run[2] for run in runs) / GIB,
    }
    if not args.profile:
        return row, []
    parts = roofline(profile.phases, {"head": {GEMM: case.model_flops}}, ceilings)  # nothing is computed twice
    return row | {"outside_share": outside_share(parts)}, parts
