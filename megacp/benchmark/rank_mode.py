"""The mode `rank`: whole steps of one rank of a job, by length, method and plan: what pretrain_llama.py rehearses.

Each row is a process of its own, `pretrain_llama.py --rehearse-world-size N`: embedding, all layers, output head, optimizer and
FSDP, the sequence one document, the collectives local copies. What other flags of it a row should have comes last, after
--pretrain-flags. Parts are the rehearsal's, and rates are of the work that its report tells: after --pretrain-flags,
`--global-batch-size 4 --ffn-hidden-size 1024` makes a step of four sequences through another model.
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT
from megacp.benchmark.environment import ROOT
from megacp.benchmark.flags import check_ranks, heads_per_stage, query_chunk, stage_sizes, token_count
from megacp.benchmark.report import Column
from megacp.benchmark.session import DTYPES, Session, model_named
from megacp.memory.policy import PLANS
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.training.metrics import causal_pairs, model_flops_per_step
from megacp.training.rehearsals import STUB, Rehearsal, read_json, read_rehearsal

# What a row gives pretrain_llama.py or is told by, and the flag here that changes it; None: nothing does.
ROW_FLAGS = {
    "--model": "--model", "--num-layers": "--num-layers", "--seq-length": "--seq-length", "--context-parallel-size": "--ranks",
    "--rehearse-world-size": "--ranks", "--upipe-heads-per-stage": "--heads-per-stage", "--cp-comm-type": "--heads-per-stage",
    "--activation-memory": "--activation-memory", "--upipe-query-chunk": "--query-chunk", "--train-iters": "--repeats",
    "--device": "--device", "--bf16": "--dtype", "--fp32": "--dtype", "--seed": "--seed", "--rehearse-json": "--out",
    "--attention-mask": None, "--rehearse-layers": None, "--num-attention-heads": None,
}  # fmt: skip
STEP_LINE = re.compile(r"^step \d+/\d+ \| +([0-9.]+) s", re.MULTILINE)

COLUMNS = [
    Column("seq_length", "length", "tokens", 8), Column("method", "method", "", 10), Column("plan", "plan", "", 6),
    Column("query_chunk", "q chunk", "tokens", 7), Column("layers", "layers", "", 6), Column("attention", "attn", "", 9),
    Column("first_s", "first s", ".2f", 9), Column("seconds", "step s", ".3f", 9),
    Column("tokens_per_s_per_gpu", "tok/s/GPU", ",.1f", 10), Column("model_tflops", "TFLOP/s", ".4g", 8),
    Column("matmul_share", "% matmul", "%", 8), Column("peak_gib", "peak GiB", ".3f", 9), Column("forward_u", "fwd u", ".2f", 6),
    Column("backward_u", "bwd u", ".2f", 6), Column("host_gib", "host GiB", ".2f", 9),
]  # fmt: skip


@dataclass(frozen=True)
class RankCase:
    """`config`: the preset with the layers that run. --pretrain-flags may change its other sizes, but for the heads."""

    config: ModelConfig
    ranks: int
    seq_length: int
    heads_per_stage: int
    activation_memory: str
    query_chunk: int | None

    @property
    def model_flops(self) -> int:
        """Of one sequence on one rank, by `config`: the runner guesses from it how long a step takes."""
        return model_flops_per_step(self.config, self.seq_length, causal_pairs((0, self.seq_length))) // self.ranks

    def describe(self) -> dict:
        heads = self.config.num_attention_heads
        return {
            "model": self.config.name, "layers": self.config.num_layers, "ranks": self.ranks, "seq_length": self.seq_length,
            "method": "a2a" if self.heads_per_stage == heads else f"upipe U={self.heads_per_stage}",
            "heads_per_stage": self.heads_per_stage, "plan": self.activation_memory, "query_chunk": self.query_chunk,
        }  # fmt: skip

    def flags(self) -> list[str]:
        """Of pretrain_llama.py."""
        chunk = [] if self.query_chunk is None else ["--upipe-query-chunk", str(self.query_chunk)]
        return [
            "--rehearse-world-size", str(self.ranks), "--context-parallel-size", str(self.ranks), "--model", self.config.name,
            "--num-layers", str(self.config.num_layers), "--seq-length", str(self.seq_length), "--upipe-heads-per-stage",
            str(self.heads_per_stage), "--activation-memory", self.activation_memory, "--mock-data", "--attention-mask", "causal",
            *chunk,
        ]  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rank", "Every combination of what takes several values is a row.")
    add = group.add_argument
    add("--model", default="llama3-8b", metavar="PRESET", help="as of pretrain_llama.py")
    add("--num-layers", type=COUNT, metavar="N", help="fewer than the model has, for shorter steps; rates are of these")
    add("--ranks", type=COUNT, default=8, metavar="N", help="context-parallel ranks of the job; this is one of them")
    add("--seq-length", type=token_count, nargs="+", default=[131072], metavar="TOKENS",
        help="of the whole sequence: 131072, 128K, 1M (default: 128K)")  # fmt: skip
    add("--heads-per-stage", type=heads_per_stage, nargs="+", metavar="U",
        help="query heads in flight over the group; a2a: all, plain Ulysses (default: --ranks)")  # fmt: skip
    add("--activation-memory", choices=("auto", *PLANS), nargs="+", default=["auto"],
        help="where layers keep activations (default: auto)")  # fmt: skip
    add("--query-chunk", type=query_chunk, nargs="+", default=[None], metavar="TOKENS",
        help="of a rank whose queries are in flight; all: not chunked (default: all)")  # fmt: skip
    add("--pretrain-flags", nargs=argparse.REMAINDER, default=[], help="all that follows goes to pretrain_llama.py as it is")


def cases(args: argparse.Namespace) -> list[RankCase]:
    """Raises ArgumentError; what pretrain_llama.py refuses becomes the row's problem."""
    config = model_named(args.model)
    if args.num_layers:
        config = replace(config, num_layers=args.num_layers)
    if not (ROOT / "pretrain_llama.py").exists():
        raise ArgumentError(f"the mode rank runs pretrain_llama.py, which is not in {ROOT}; a checkout of the project works")
    for flag in (word.partition("=")[0] for word in args.pretrain_flags):
        if flag in ROW_FLAGS:
            works = f"{ROW_FLAGS[flag]}, before --pretrain-flags," if ROW_FLAGS[flag] else "a run without it"
            raise ArgumentError(f"--pretrain-flags {flag} contradicts the row, which is counted by its own; {works} works")
    stages = stage_sizes(args.heads_per_stage or [args.ranks], config)
    check_ranks(config, args.ranks, stages, args.seq_length)
    grid = itertools.product(sorted(args.seq_length), args.activation_memory, stages, args.query_chunk)
    return [RankCase(config, args.ranks, length, heads, memory, chunk) for length, memory, heads, chunk in grid]


def run(session: Session) -> None:
    args, runner = session.args, session.runner("rank", COLUMNS)
    for case in cases(args):
        runner.run(case.describe(), case.model_flops, args.warmup + args.repeats, partial(_measure, session, case))


def _measure(session: Session, case: RankCase) -> tuple[dict, list[dict]]:
    args = session.args
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        own = [
            "--train-iters", str(args.warmup + args.repeats), "--rehearse-json", str(file), "--device", session.device.type,
            f"--{next(name for name, dtype in DTYPES.items() if dtype == session.dtype)}", "--seed", str(args.seed),
        ]  # fmt: skip
        command = [sys.executable, "pretrain_llama.py", *case.flags(), *own, *args.pretrain_flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            raise ValueError(lines[-1].removeprefix("error: "))
        rehearsal, report = read_rehearsal(str(file)), read_json(str(file), "--rehearse-json of pretrain_llama.py")
    steps = [float(seconds) for seconds in STEP_LINE.findall(done.stdout)]
    return rank_row(rehearsal, report, steps, args.warmup, session.ceilings.matmul), _parts(report)


def rank_row(rehearsal: Rehearsal, report: dict, steps: list[float], warmup: int, matmul: float) -> dict:
    """`report`: what `rehearsal` was read from. `steps`: seconds of all; the first `warmup` do not count. `matmul` in FLOP/s.

    A step is all its micro-batches. A stub of attention computed nothing, so nothing is counted for it.
    """
    seconds, ranks = statistics.median(steps[warmup:]), rehearsal.job.schedule.ulysses_degree
    tokens = rehearsal.micro_batches * rehearsal.job.tokens  # of this rank
    pairs = 0 if rehearsal.attention.startswith(STUB) else rehearsal.attention_pairs  # of all ranks' heads
    rate = model_flops_per_step(rehearsal.job.config, ranks * tokens, pairs) / ranks / seconds
    return {
        "attention": rehearsal.attention,
        "first_s": steps[0],
        "seconds": seconds,
        "tokens_per_s_per_gpu": tokens / seconds,
        "model_tflops": rate / 1e12,
        "matmul_share": rate / matmul,
        "peak_gib": report["peak"] / GIB,
        "states_gib": report["states"] / GIB,
        "forward_u": report["layer_forward"] / report["u"],
        "backward_u": report["layer_backward"] / report["u"],
        "host_gib": report["host"] / GIB,
        "u_gib": report["u"] / GIB,
    }


def _parts(report: dict) -> list[dict]:
    """Of the last step; the rest is gathering and reducing weights, copies and waiting."""
    step = report["step_seconds"]
    seconds = report["part_seconds"] | {"other": step - sum(report["part_seconds"].values())}
    return [{"phase": "step", "part": part, "exposed_s": s, "exposed_share": s / step} for part, s in seconds.items()]
