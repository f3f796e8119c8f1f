"""The mode `layer`: one decoder layer of one rank by length, method, plan, query chunk and tile.

Every combination of the flags' values is a row; the shortest first, so that what is long comes when what is short is measured.
"""

import argparse
import itertools
from functools import partial

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT
from megacp.benchmark.flags import check_documents, check_ranks, heads_per_stage, query_chunk, stage_sizes, token_count
from megacp.benchmark.kernel_classes import ATTENTION, GEMM
from megacp.benchmark.kernel_profile import KernelProfile
from megacp.benchmark.layer_bench import LayerBench, LayerCase, gemm_flops, layer_row
from megacp.benchmark.report import Column
from megacp.benchmark.roofline import outside_share, roofline
from megacp.benchmark.session import Session, model_named
from megacp.kernels.attention.dispatch import BACKENDS
from megacp.memory.policy import PLANS
from megacp.model.layer_context import default_tile_size
from megacp.training.memory_phases import device_gauge

COLUMNS = [
    Column("seq_length", "length", "tokens", 8), Column("documents", "docs", ",", 5), Column("method", "method", "", 10),
    Column("plan", "plan", "", 18), Column("prefetch", "ahead", "", 5), Column("query_chunk", "q chunk", "tokens", 7),
    Column("mlp_tile_size", "tile", "tokens", 5), Column("attention", "attn", "", 9), Column("first_s", "first s", ".3f", 9),
    Column("forward_s", "fwd s", ".4f", 9), Column("backward_s", "bwd s", ".4f", 9),
    Column("tokens_per_s_per_gpu", "tok/s/GPU", ",.1f", 10), Column("model_tflops", "TFLOP/s", ".4g", 8),
    Column("matmul_share", "% matmul", "%", 8), Column("peak_gib", "peak GiB", ".3f", 9), Column("forward_u", "fwd u", ".2f", 6),
    Column("backward_u", "bwd u", ".2f", 6), Column("outside_share", "% other", "%", 7),
]  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layer", "Every combination of what takes several values is a row.")
    add = group.add_argument
    add("--model", default="llama3-8b", metavar="PRESET", help="as of pretrain_llama.py")
    add("--ranks", type=COUNT, default=8, metavar="N", help="context-parallel ranks of the job; this is one of them")
    add("--seq-length", type=token_count, nargs="+", default=[131072], metavar="TOKENS",
        help="of the whole sequence: 131072, 128K, 1M (default: 128K)")  # fmt: skip
    add("--heads-per-stage", type=heads_per_stage, nargs="+", metavar="U",
        help="query heads in flight over the group; a2a: all, plain Ulysses (default: --ranks, and a2a)")  # fmt: skip
    add("--activation-memory", choices=tuple(PLANS), nargs="+", default=["gpu"],
        help="where the layer keeps its activations (default: gpu)")  # fmt: skip
    add("--recompute-granularity", choices=("none", "selective", "full"), nargs="+", default=["selective"],
        help="full: the attention forward runs again in the backward; none: no matrix product does (default: selective)")  # fmt: skip
    add("--upipe-prefetch", type=int, choices=(0, 1), nargs="+", default=[0],
        help="1: exchanges of the next stage run under this one's attention (default: 0)")  # fmt: skip
    add("--query-chunk", type=query_chunk, nargs="+", default=[None], metavar="TOKENS",
        help="of a rank whose queries are in flight; all: not chunked (default: all)")  # fmt: skip
    add("--mlp-tile-size", type=token_count, nargs="+", metavar="TOKENS", help="of a rank per step (default: as of pretrain_llama.py)")
    add("--documents", type=token_count, nargs="+", default=[1], metavar="N", help="of equal length in the sequence (default: 1)")
    add("--layers", type=COUNT, default=1, metavar="N",
        help="timed one after another, as in a step, where the host is ahead of the device from the second on; figures are those of one "
        "layer (default: 1)")  # fmt: skip
    add("--attention-backend", choices=("auto", *BACKENDS), default="auto", metavar="NAME",
        help=f"auto or one of {', '.join(BACKENDS)}")  # fmt: skip
    add("--disk-offload-dir", metavar="DIR", help="for --activation-memory disk")
    add("--no-profile", action="store_false", dest="profile",
        help="without the one repetition more, not timed, whose kernels tell where the time goes")  # fmt: skip


def cases(args: argparse.Namespace) -> list[LayerCase]:
    """Raises ArgumentError naming a flag, its value and one that works."""
    config = model_named(args.model)
    stages = stage_sizes(args.heads_per_stage or [args.ranks, None], config)
    check_ranks(config, args.ranks, stages, args.seq_length)
    check_documents(args.documents, args.seq_length)
    tiled = [
        (chunk, tile)
        for chunk in args.query_chunk
        for tile in args.mlp_tile_size or [default_tile_size(config.ffn_hidden_size, chunk)]
    ]
    for chunk, tile in tiled:
        if chunk and chunk % tile:
            raise ArgumentError(f"--query-chunk {chunk} is not a multiple of --mlp-tile-size {tile}; {-(-chunk // tile) * tile} is")
    if args.layers > 1 and not args.warmup:
        raise ArgumentError(f"--layers {args.layers} with --warmup 0: memory is measured in the first repetition, with one layer; --warmup 1 works")
    if "disk" in args.activation_memory and args.disk_offload_dir is None:
        raise ArgumentError("--activation-memory disk needs --disk-offload-dir DIR, a directory on a local disk")
    elsewhere = [memory for memory in args.activation_memory if memory != "gpu"]
    if "none" in args.recompute_granularity and elsewhere:
        raise ArgumentError(
            f"--recompute-granularity none keeps all on the GPU, which --activation-memory {elsewhere[0]} contradicts; selective or "
            "--activation-memory gpu works"
        )
    grid = itertools.product(
        sorted(args.seq_length), args.documents, args.activation_memory, args.recompute_granularity, stages,
        args.upipe_prefetch, tiled,
    )  # fmt: skip
    return [
        LayerCase(
            config, args.ranks, length, heads, memory, recompute, chunk, tile, documents, args.attention_backend,
            args.disk_offload_dir, prefetch,
        )  # fmt: skip
        for length, documents, memory, recompute, heads, prefetch, (chunk, tile) in grid
    ]


def run(session: Session) -> None:
    args, runner = session.args, session.runner("layer", COLUMNS)
    for case in cases(args):
        repetitions = args.warmup + (args.repeats + args.profile) * args.layers
        runner.run(case.describe(), case.model_flops, repetitions, partial(_measure, session, case))


def _measure(session: Session, case: LayerCase) -> tuple[dict, list[dict]]:
    args = session.args
    with device_gauge(session.device) as gauge:
        bench = LayerBench(case, session.device, session.dtype, gauge, args.layers)
        runs = [bench.run(layers=args.layers if number else 1) for number in range(args.warmup + args.repeats)]
        bench.check_finite()
        row = layer_row(case, bench, runs[0], runs[args.warmup :], session.ceilings)
        if not args.profile:
            return row, []
        profile = KernelProfile(session.device)
        bench.run(around=profile, layers=args.layers)
    (attention_forward, attention_backward), (gemm_forward, gemm_backward) = case.attention_flops, gemm_flops(case)
    flops = {
        "forward": {ATTENTION: args.layers * attention_forward, GEMM: args.layers * gemm_forward},
        "backward": {ATTENTION: args.layers * attention_backward, GEMM: args.layers * gemm_backward},
    }
    parts = roofline(profile.phases, flops, session.ceilings)
    for part in parts:
        part |= {name: part[name] / args.layers for name in ("busy_s", "exposed_s", "count", "work") if name in part}
    return row | {"outside_share": outside_share(parts)}, parts
