"""The mode `attention`: the kernels alone, by backend, length, heads and documents, forward and backward.

Rates are executed FLOPs, causal inside each document: 4 x heads x head dim x pairs forward, 2.5 times that backward (five products
where the forward has two). The first call, which may compile or build a plan, is told apart from the median of those after it.
"""

import argparse
import itertools
from dataclasses import dataclass
from functools import partial

import torch

from megacp.arguments import COUNT
from megacp.benchmark.clock import call_seconds, seconds_of
from megacp.benchmark.flags import check_documents, head_shape, token_count
from megacp.benchmark.report import Column
from megacp.benchmark.session import Session
from megacp.benchmark.work import attention_flops, equal_borders, uneven_borders
from megacp.kernels.attention import Documents, attention_backward, attention_forward, select_backend
from megacp.kernels.attention.dispatch import BACKENDS
from megacp.memory.units import GIB
from megacp.training.memory_phases import device_gauge
from megacp.training.metrics import causal_pairs

COLUMNS = [
    Column("backend", "backend", "", 9), Column("seq_length", "length", "tokens", 8), Column("heads", "q:kv", "", 6),
    Column("documents", "docs", ",", 7), Column("lengths", "lengths", "", 7), Column("longest", "longest", ",", 11),
    Column("first_forward_s", "first fwd s", ".3f", 11), Column("first_backward_s", "first bwd s", ".3f", 11),
    Column("forward_s", "fwd s", ".5f", 10), Column("backward_s", "bwd s", ".5f", 10),
    Column("forward_tflops", "fwd TFLOP/s", ".4g", 11), Column("backward_tflops", "bwd TFLOP/s", ".4g", 11),
    Column("forward_share", "% matmul", "%", 8), Column("backward_share", "% matmul", "%", 8),
    Column("peak_gib", "peak GiB", ".3f", 9),
]  # fmt: skip


@dataclass(frozen=True)
class AttentionCase:
    """`lengths`: equal, or uneven, of documents between borders drawn at random."""

    backend: str
    seq_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    documents: int
    lengths: str
    seed: int
    deterministic: bool = False

    @property
    def borders(self) -> tuple[int, ...]:
        if self.lengths == "equal":
            return equal_borders(self.seq_length, self.documents)
        return uneven_borders(self.seq_length, self.documents, self.seed)

    @property
    def flops(self) -> tuple[int, int]:
        """Executed, forward and backward."""
        return attention_flops(self.q_heads, self.head_dim, causal_pairs(self.borders))

    def describe(self) -> dict:
        return {
            "backend": self.backend, "seq_length": self.seq_length, "heads": f"{self.q_heads}:{self.kv_heads}",
            "head_dim": self.head_dim, "documents": self.documents, "lengths": self.lengths,
            "deterministic": self.deterministic,
        }  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention", "Every combination of what takes several values is a row.")
    add = group.add_argument
    add("--seq-length", type=token_count, nargs="+", default=[16384, 131072], metavar="TOKENS",
        help="of the stream: 131072, 128K, 1M (default: 16K 128K)")  # fmt: skip
    add("--heads", type=head_shape, nargs="+", default=[(1, 1), (4, 1)], metavar="Q:KV",
        help="query and key/value heads of a call (default: 1:1 4:1)")  # fmt: skip
    add("--head-dim", type=COUNT, default=128, metavar="N", help="width of a head")
    add("--documents", type=token_count, nargs="+", default=[1], metavar="N", help="in the stream: 1, 8, 1K (default: 1)")
    add("--lengths", choices=("equal", "uneven"), nargs="+", default=["equal"],
        help="of documents; uneven: at random (default: equal)")  # fmt: skip
    add("--attention-backend", choices=tuple(BACKENDS), nargs="+", default=[name for name in BACKENDS if name != "reference"],
        metavar="NAME", help=f"some of {', '.join(BACKENDS)} (default: all but reference)")  # fmt: skip
    add("--deterministic", action="store_true", help="a backward that gives the same bits each time")


def cases(args: argparse.Namespace) -> list[AttentionCase]:
    """Raises ArgumentError naming a flag, its value and one that works."""
    check_documents(args.documents, args.seq_length)
    grid = itertools.product(sorted(args.seq_length), args.heads, args.documents, args.lengths, args.attention_backend)
    return [
        AttentionCase(backend, length, *heads, args.head_dim, documents, lengths, args.seed, args.deterministic)
        for length, heads, documents, lengths, backend in grid
        if documents > 1 or lengths == args.lengths[0]  # one document is neither equal nor uneven
    ]


def run(session: Session) -> None:
    args, runner = session.args, session.runner("attention", COLUMNS)
    for case in cases(args):
        runner.run(case.describe(), sum(case.flops), 1 + args.warmup + args.repeats, partial(_measure, session, case))


def _measure(session: Session, case: AttentionCase) -> tuple[dict, list[dict]]:
    device, dtype, args = session.device, session.dtype, session.args
    documents, scale = Documents(case.borders), case.head_dim**-0.5
    select_backend(
        case.backend, device, dtype, case.head_dim, case.q_heads, case.kv_heads, documents, deterministic=case.deterministic
    )  # ValueError: refused
    with device_gauge(device) as gauge:
        gauge.reset_peak()
        q, do = (torch.randn(case.seq_length, case.q_heads, case.head_dim, device=device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(case.seq_length, case.kv_heads, case.head_dim, device=device, dtype=dtype) for _ in range(2))
        results = {}

        def forward() -> None:
            results["o"], results["lse"] = attention_forward(q, k, v, documents, scale, case.backend)

        def backward() -> None:
            results["dq"], *_ = attention_backward(
                do, q, k, v, results["o"], results["lse"], documents, scale, case.backend, case.deterministic
            )

        seconds = {}
        for name, call in (("forward", forward), ("backward", backward)):
            seconds[f"first_{name}_s"] = seconds_of(call, device)
            for _ in range(args.warmup):
                call()
            seconds[f"{name}_s"] = call_seconds(call, device, args.repeats)
        if not torch.isfinite(results["dq"].sum()):
            raise ArithmeticError(f"dq of {case.backend} is not finite")
        peak = gauge.peak_bytes()
    row = {"longest": documents.max_seqlen, "seconds": seconds["forward_s"] + seconds["backward_s"]} | seconds
    for name, flops in zip(("forward", "backward"), case.flops):
        rate = flops / seconds[f"{name}_s"]
        row |= {f"{name}_tflops": rate / 1e12, f"{name}_share": rate / session.ceilings.matmul}
    return row | {"peak_gib": peak / GIB}, []
