"""Every flag of a training run, once: grouped, typed, with its default and unit.

    args = parse_args("--model llama3-8b --context-parallel-size 8 --seq-length 1048576 --mock-data".split())
    notes = validate_args(args, world_size=16)  # before any process group; ArgumentError says what would work
    args.upipe_heads_per_stage, args.global_batch_size  # (8, 2): what was left open is filled in
    config = model_config_from_args(args)  # the preset with the overrides applied
    dtype = resolve_precision(args, "cuda")  # torch.bfloat16

Names are Megatron's where Megatron has the flag. A flag that is left out keeps the value of its help text; flags of the
model keep the preset's value. What flags must satisfy together is in `megacp/argument_checks.py`.
"""

import argparse
import dataclasses
import math

import torch

from megacp.argument_checks import (
    ArgumentError,
    check_batch,
    check_data,
    check_evaluation,
    check_memory,
    check_model,
    check_parallel,
    check_pretrained,
    check_profiling,
    check_rehearsal,
    check_rehearsed_layers,
    check_rope_scaling,
    check_schedule,
    check_state,
    long_context_notes,
)
from megacp.checkpointing.huggingface_config import model_config
from megacp.context_parallel.head_schedule import legal_heads_per_stage
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import PRESETS, ModelConfig, preset
from megacp.model.layer_context import LEAST_TILE, MOST_TILE, default_tile_size

DEFAULT_MODEL = "llama-tiny"
PROFILED_STEP, PROFILED_STEPS = 10, 2  # the first one, when all is warm, and how many
DEFAULT_STAGES = 4  # at the most
REHEARSED_STEPS = 3  # the first compiles and allocates the moments; the last is reported
EXAMPLE = """example, one node of 8 GPUs:
  torchrun --nproc-per-node 8 pretrain_llama.py --model llama3-8b --context-parallel-size 8 --seq-length 1048576 \\
      --data-path corpus --tokenizer-model tokenizer.json --train-iters 1000
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags as a namespace (dashes become underscores); `argv` None reads the command line. Not checked together yet."""
    return build_parser().parse_args(argv)


def validate_args(args: argparse.Namespace, world_size: int) -> list[str]:
    """Refuse what cannot run on `world_size` ranks, then fill in what was left open. Touches no device and no file but the
    config.json of --load-hf.

    Fills global_batch_size (sequences), upipe_heads_per_stage, mlp_tile_size, lr_decay_iters, with the WSD style
    lr_wsd_decay_iters, with --profile its steps.
    Returns notes for the person (one line each): legal, but maybe not meant. Raises ArgumentError.
    """
    check_pretrained(args, _base_config(args))
    check_rope_scaling(args, _base_config(args))
    check_rehearsal(args)
    if not args.train_iters:
        args.train_iters = REHEARSED_STEPS if args.rehearse_world_size else 1000
    config = model_config_from_args(args)
    check_model(args, config)
    args.mlp_tile_size = tile_size_of(args, config)
    check_rehearsed_layers(args, config)
    check_parallel(args, config, world_size)
    check_batch(args, world_size)
    check_memory(args)
    check_schedule(args)
    check_data(args)
    check_evaluation(args)
    check_state(args)
    check_profiling(args, world_size)

    context = args.context_parallel_size
    if not args.upipe_heads_per_stage:
        # One rank sends nothing. Many stages of few heads are many small kernels, which the host may not launch fast enough.
        stages = DEFAULT_STAGES if args.cp_comm_type == "upipe" and context > 1 else 1
        sizes = legal_heads_per_stage(config.num_attention_heads, context)
        args.upipe_heads_per_stage = next(size for size in sizes if stages * size >= config.num_attention_heads)
    if not args.global_batch_size:
        args.global_batch_size = args.micro_batch_size * (world_size // context)
    if not args.lr_decay_iters:
        args.lr_decay_iters = args.train_iters
    if args.profile and not args.profile_step_start:
        args.profile_step_start = min(PROFILED_STEP, args.train_iters)
    if args.profile and args.profile_ranks is None:
        args.profile_ranks = [args.rehearse_rank]
    if args.profile and not args.profile_step_end:
        args.profile_step_end = args.profile_step_start + PROFILED_STEPS
    if args.lr_decay_style == "WSD" and not args.lr_wsd_decay_iters:
        args.lr_wsd_decay_iters = max(1, min(args.lr_decay_iters // 10, args.lr_decay_iters - args.lr_warmup_iters))
    return long_context_notes(args, config)


def model_config_from_args(args: argparse.Namespace) -> ModelConfig:
    """The preset of --model, or the model of --load-hf, with every given field replaced. Raises ArgumentError for an unknown
    preset, PretrainedError for a folder that cannot be used.
    """
    base = _base_config(args)
    fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in ("name", "rope_scaling")]
    given = {name: getattr(args, name) for name in fields if getattr(args, name, None) is not None}
    return dataclasses.replace(base, rope_scaling=rope_scaling_from_args(args, base), **given)


def tile_size_of(args: argparse.Namespace, config: ModelConfig) -> int:
    """--mlp-tile-size, or what it is when left open."""
    return args.mlp_tile_size or default_tile_size(config.ffn_hidden_size, args.upipe_query_chunk)


def resolve_precision(args: argparse.Namespace, device: torch.device | str) -> torch.dtype:
    """The dtype of the forward and backward on `device`: as asked, else bfloat16 on cuda and float32 on cpu."""
    if args.bf16 or args.fp32:
        return torch.bfloat16 if args.bf16 else torch.float32
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _base_config(args: argparse.Namespace) -> ModelConfig:
    if args.load_hf is not None:
        return model_config(args.load_hf)
    try:
        return preset(args.model or DEFAULT_MODEL)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def rope_scaling_from_args(args: argparse.Namespace, base: ModelConfig) -> RopeScaling | None:
    """The scaling of `base` with the flags of rotary positions applied."""
    kind = args.rope_scaling_type or (base.rope_scaling.type if base.rope_scaling else "none")
    if kind == "none":
        return None
    if base.rope_scaling is not None and base.rope_scaling.type == kind:
        values = dataclasses.asdict(base.rope_scaling)
    else:  # Llama 3.1's numbers; YaRN's original length is the model's own
        original = 8192 if kind == "llama3" else base.max_position_embeddings
        values = dict(type=kind, factor=8.0, original_max_position_embeddings=original)
    given = dict(
        factor=args.rope_scaling_factor,
        original_max_position_embeddings=args.rope_original_max_position_embeddings,
        low_freq_factor=args.rope_low_freq_factor,
        high_freq_factor=args.rope_high_freq_factor,
        beta_fast=args.rope_beta_fast,
        beta_slow=args.rope_beta_slow,
        attention_factor=args.rope_attention_factor,
    )
    return RopeScaling(**values | {name: value for name, value in given.items() if value is not None})


# ---------------------------------------------------------------------------------------------------------------- the flags


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to every help text that does not speak of it, and uses the width of the terminal."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=40)

    def _get_help_string(self, action):
        default = action.default
        silent = default is None or isinstance(default, bool) or default == argparse.SUPPRESS or "default" in action.help
        return action.help if silent else f"{action.help} (default: %(default)s)"


def number(kind, minimum=None, above=None, below=None):
    """An argparse type: an int or float inside its range. The error says the range."""
    bounds = [
        f"{word} {bound}"
        for word, bound in (("at least", minimum), ("more than", above), ("less than", below))
        if bound is not None
    ]
    wanted = f"{'a whole number' if kind is int else 'a number'} {' and '.join(bounds)}".strip()

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        fits = (
            math.isfinite(value)
            and (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (below is None or value < below)
        )
        if not fits:
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return parse


COUNT = number(int, minimum=1)
COUNT_OR_ZERO = number(int, minimum=0)
POSITIVE = number(float, above=0)
POSITIVE_OR_ZERO = number(float, minimum=0)
FRACTION = number(float, minimum=0, below=1)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a Llama- or Qwen3-style decoder on long packed sequences.",
        usage="torchrun --nproc-per-node RANKS pretrain_llama.py [flags]",
        epilog=EXAMPLE,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    groups = (
        _add_model, add_rope_flags, _add_parallel, _add_memory, _add_training, _add_schedule, _add_data, _add_evaluation, _add_state,
        _add_logging, _add_profiling, _add_rehearsal,
    )  # fmt: skip
    for add in groups:
        add(parser)
    return parser


def _add_model(parser):
    group = parser.add_argument_group("model", "A preset; every field can be overridden.")
    add = group.add_argument
    add("--model", metavar="PRESET", help=f"one of {', '.join(PRESETS)} (default: {DEFAULT_MODEL})")
    add("--num-layers", type=COUNT, metavar="N", help="decoder layers")
    add("--hidden-size", type=COUNT, metavar="N", help="width of the residual stream")
    add("--ffn-hidden-size", type=COUNT, metavar="N", help="width of the SwiGLU MLP")
    add("--num-attention-heads", type=COUNT, metavar="N", help="query heads")
    add("--num-query-groups", type=COUNT, metavar="N", help="key/value heads; divides --num-attention-heads")
    add("--kv-channels", type=COUNT, metavar="N", help="width of one head; even")
    add("--vocab-size", type=COUNT, metavar="N", help="rows of the embedding; at least the tokenizer's size")
    add("--max-position-embeddings", type=COUNT, metavar="TOKENS", help="context the model is made for; longer is a warning")
    add("--norm-epsilon", type=POSITIVE, metavar="EPS", help="added to the mean square inside RMSNorm")
    add("--qk-layernorm", action=argparse.BooleanOptionalAction, help="RMSNorm on every query and key head, as in Qwen3")
    add("--untie-embeddings-and-output-weights", action=argparse.BooleanOptionalAction,
        help="give the output head weights of its own")  # fmt: skip
    add("--init-method-std", type=POSITIVE, metavar="STD", help="standard deviation of the initial weights")


def add_rope_flags(parser):
    """The flags that `rope_scaling_from_args` reads, and --rotary-base."""
    group = parser.add_argument_group("rotary positions", "The preset's values unless given.")
    add = group.add_argument
    add("--rotary-base", type=POSITIVE, metavar="BASE", help="theta: the slowest pair turns once in about 2 pi theta tokens")
    add("--rope-scaling-type", choices=("none", "llama3", "yarn"), help="how frequencies are slowed for longer contexts")
    add("--rope-scaling-factor", type=number(float, minimum=1), metavar="X",
        help="longer context / original context (default with llama3: 8; yarn needs it)")  # fmt: skip
    add("--rope-original-max-position-embeddings", type=COUNT, metavar="TOKENS",
        help="context before scaling (default with llama3: 8192, with yarn: the preset's)")  # fmt: skip
    add("--rope-low-freq-factor", type=POSITIVE, metavar="X",
        help="llama3: pairs with fewer turns over the original context are scaled (default: 1)")  # fmt: skip
    add("--rope-high-freq-factor", type=POSITIVE, metavar="X", help="llama3: pairs with more turns are kept (default: 4)")
    add("--rope-beta-fast", type=POSITIVE, metavar="X",
        help="yarn: pairs with more turns over the original context are kept (default: 32)")  # fmt: skip
    add("--rope-beta-slow", type=POSITIVE, metavar="X", help="yarn: pairs with fewer turns are scaled (default: 1)")
    add("--rope-attention-factor", type=POSITIVE, metavar="X",
        help="yarn: factor on cos and sin (default: 0.1 ln(scaling factor) + 1)")  # fmt: skip


def _add_parallel(parser):
    group = parser.add_argument_group("parallelism", "Data parallelism takes the ranks that context parallelism leaves.")
    add = group.add_argument
    add("--context-parallel-size", type=COUNT, default=1, metavar="C", help="ranks that share one sequence")
    add("--cp-comm-type", choices=("upipe", "a2a"), default="upipe",
        help="a2a: all heads travel at once (Ulysses); upipe: in stages, which takes less memory")  # fmt: skip
    add("--upipe-heads-per-stage", type=COUNT, metavar="U",
        help="query heads in flight over the context group; a multiple of C, which itself takes the least memory (default: the fewest "
        "that make four stages or less; all on one rank)")  # fmt: skip
    add("--upipe-query-chunk", type=COUNT, metavar="TOKENS",
        help="tokens of each rank whose queries are in flight at a time, a multiple of --mlp-tile-size (default: all)")  # fmt: skip
    add("--upipe-prefetch", type=int, choices=(0, 1), default=0,
        help="1: send what the next stage needs before this one's attention, so that exchanges run under it; takes a stage's buffers "
        "more, and pays where links are slow (default: 0)")  # fmt: skip
    add("--pipeline-model-parallel-size", type=COUNT, default=1, metavar="P", help="pipeline stages; only 1 for now")
    add("--distributed-timeout-minutes", type=POSITIVE_OR_ZERO, default=0.0, metavar="MIN",
        help="a collective that waits longer ends the job; 0: from the predicted step time")  # fmt: skip


def _add_memory(parser):
    group = parser.add_argument_group(
        "memory", "Where a layer keeps what its backward needs (its input, its attention output), and where the optimizer is."
    )
    add = group.add_argument
    add("--activation-memory", choices=("auto", "gpu", "host", "disk", "lean"), default="auto",
        help="auto: the fastest that fits, chosen layer by layer; host: in pinned host memory; disk: in --disk-offload-dir; lean: as host, and the backward's residual gradient too")  # fmt: skip
    add("--recompute-granularity", choices=("none", "selective", "full"), default="selective",
        help="selective: all but the attention is made again in the backward (Megatron: core attention alone); full: the attention too, which keeps half as much; none: no matrix product, which keeps five times as much, on the GPU")  # fmt: skip
    add("--gpu-memory-gib", type=POSITIVE, metavar="GIB",
        help="GPU memory that auto may plan with on one rank (default: nine tenths of what the GPU has)")  # fmt: skip
    add("--gpu-memory-limit-gib", type=POSITIVE, metavar="GIB",
        help="most that PyTorch takes of a GPU, as if it were a smaller one: a step that needs more ends with an error, and auto plans with nine tenths of it; on a CPU a rehearsal's count is held to it (default: no limit)")  # fmt: skip
    add("--host-memory-gib", type=POSITIVE, metavar="GIB",
        help="host memory that one rank's activations, and states with --optimizer-cpu-offload, may take; a plan that needs more is refused (default: no limit)")  # fmt: skip
    add("--disk-offload-dir", metavar="DIR",
        help="directory on a fast local disk for --activation-memory disk; a file a rank, gone when the run ends, however it ends")  # fmt: skip
    add("--disk-memory-gib", type=POSITIVE, metavar="GIB",
        help="room there that the activations of one rank may take; a plan that needs more is refused (default: no limit)")  # fmt: skip
    add("--optimizer-cpu-offload", action="store_true",
        help="keep master weights, AdamW's moments and gradients in host memory, 16 bytes a parameter over all ranks, and update them there")  # fmt: skip


def _add_training(parser):
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--seq-length", type=COUNT, default=8192, metavar="TOKENS", help="length of one packed sequence, over all ranks")
    add("--micro-batch-size", type=COUNT, default=1, metavar="N", help="sequences packed into one forward and backward")
    add("--global-batch-size", type=COUNT_OR_ZERO, metavar="N",
        help="sequences per step; more than micro batch x data-parallel size accumulates gradients (default: just that)")
    add("--train-iters", type=COUNT, metavar="STEPS", help=f"optimizer steps of the whole run (default: 1000; rehearsed, {REHEARSED_STEPS})")
    add("--weight-decay", type=POSITIVE_OR_ZERO, default=0.1, metavar="X", help="AdamW, on matrices only")
    add("--adam-beta1", type=FRACTION, default=0.9, metavar="X", help="decay of the mean gradient")
    add("--adam-beta2", type=FRACTION, default=0.95, metavar="X", help="decay of the mean squared gradient")
    add("--adam-eps", type=POSITIVE, default=1e-8, metavar="X", help="added to the root of the mean squared gradient")
    add("--clip-grad", type=POSITIVE_OR_ZERO, default=1.0, metavar="NORM", help="largest global gradient norm; 0: no clipping")
    add("--seed", type=COUNT_OR_ZERO, default=1234, metavar="N", help="of weights and data order")
    add("--bf16", action="store_true", help="bf16 compute, fp32 master weights (default on cuda)")
    add("--fp32", action="store_true", help="fp32 throughout (default on cpu)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda when there is one")
    add("--attention-backend", choices=("auto", "fa4", "fa3", "fa2", "cudnn", "torch", "reference"), default="auto",
        help="auto: the fastest that runs this shape")  # fmt: skip
    add("--deterministic", action="store_true",
        help="the same bits from every step of the same job on the same GPUs; attention's backward is slower")  # fmt: skip
    add("--mlp-tile-size", type=COUNT, metavar="TOKENS",
        help=f"tokens of a rank per step of the MLP and the projections (default: {LEAST_TILE}, up to {MOST_TILE} where the MLP is narrow)")  # fmt: skip
    add("--loss-tile-size", type=COUNT, default=4096, metavar="TOKENS", help="tokens of a rank per step of the output head")
    add("--dry-run", action="store_true", help="build everything but the weights, print the summary, exit")


def _add_schedule(parser):
    group = parser.add_argument_group("learning rate")
    add = group.add_argument
    add("--lr", type=POSITIVE, default=3e-4, metavar="LR", help="largest learning rate")
    add("--min-lr", type=POSITIVE_OR_ZERO, default=0.0, metavar="LR", help="where the decay ends")
    add("--lr-decay-style", choices=("cosine", "linear", "constant", "WSD"), default="cosine",
        help="WSD: warm up, stay, decay")  # fmt: skip
    add("--lr-warmup-iters", type=COUNT_OR_ZERO, default=0, metavar="STEPS", help="steps of linear growth from 0")
    add("--lr-decay-iters", type=COUNT, metavar="STEPS", help="step at which --min-lr is reached (default: --train-iters)")
    add("--lr-wsd-decay-iters", type=COUNT, metavar="STEPS",
        help="length of WSD's last part (default: a tenth of --lr-decay-iters)")  # fmt: skip


def _add_data(parser):
    group = parser.add_argument_group("data", "One of --data-path, --train-data-path and --mock-data.")
    add = group.add_argument
    add("--data-path", nargs="+", metavar="W P",
        help="prefix of a .bin/.idx pair or folder of a packing plan; several as `weight path weight path ...`")  # fmt: skip
    add("--train-data-path", nargs="+", metavar="W P", help="instead of --data-path and --split: all of it is for training")
    add("--valid-data-path", nargs="+", metavar="W P", help="with --train-data-path and --eval-interval: for validation")
    add("--test-data-path", nargs="+", metavar="W P", help="with --train-data-path and --eval-interval: for the test")
    add("--mock-data", action="store_true", help="made-up documents instead of files, for trying out and measuring")
    add("--split", default="969,30,1", metavar="A,B,C",
        help="shares of the documents of --data-path (of the sequences of a plan) for training, validation, test")  # fmt: skip
    add("--tokenizer-model", metavar="FILE", help="what --data-path was preprocessed with: tokenizer.model, tokenizer.json, a folder")
    add("--tokenizer-type", choices=("SentencePiece", "HuggingFace", "Tiktoken", "Byte"),
        help="needed for Byte, which has no model (default: told by the file)")  # fmt: skip
    add("--attention-mask", choices=("document", "causal"), default="document",
        help="document: tokens see their own document; causal: the whole sequence before them")  # fmt: skip
    add("--balance-batches", action="store_true",
        help="deal the sequences of a step out to ranks and accumulation steps by their attention work")  # fmt: skip
    add("--reset-position-ids", action="store_true", help="positions start at 0 in every document, not in every sequence")
    add("--eod-mask-loss", action="store_true", help="no loss on what follows an end-of-document token")


def _add_evaluation(parser):
    group = parser.add_argument_group("evaluation", "The loss of held-out data, by how much context a token has.")
    add = group.add_argument
    add("--eval-interval", type=COUNT, metavar="STEPS",
        help="evaluate on the validation data every so many steps and at the end, there on the test data too")  # fmt: skip
    add("--eval-iters", type=COUNT, default=10, metavar="N", help="global batches of an evaluation, the same ones each time")


def _add_state(parser):
    group = parser.add_argument_group("checkpoints")
    add = group.add_argument
    add("--save", metavar="DIR", help="where checkpoints go; one is written at the end of the run")
    add("--load", metavar="DIR", help="continue from the newest checkpoint there, if any; any number of ranks")
    add("--ckpt-step", type=COUNT_OR_ZERO, metavar="STEP", help="the checkpoint of --load to take (default: the newest)")
    add("--finetune", action="store_true",
        help="take the weights of --load alone, and start at step 0 with this run's own schedule and data")
    add("--pretrained-checkpoint", metavar="DIR",
        help="start as --load DIR --finetune does; once --load holds a checkpoint, that counts, so the same command goes on later")  # fmt: skip
    add("--no-load-optim", action="store_true", help="go on from --load with AdamW's moments at zero")
    add("--load-hf", metavar="DIR",
        help="start from a Hugging Face folder, which gives the model too; once --load holds a checkpoint, that counts")
    add("--save-interval", type=COUNT, metavar="STEPS", help="also save every so many steps")
    add("--exit-interval", type=COUNT, metavar="STEPS", help="exit, after saving, at the first step that is a multiple of it")
    add("--exit-duration-in-mins", type=POSITIVE, metavar="MIN",
        help="exit, after saving, once the run has lasted so long; asked after each step, so leave time for one and for the save")
    add("--ckpt-keep", type=COUNT, default=2, metavar="N", help="newest checkpoints that stay on disk")


def _add_logging(parser):
    group = parser.add_argument_group("logging")
    add = group.add_argument
    add("--log-interval", type=COUNT, default=1, metavar="STEPS", help="steps per line on the console")
    add("--tensorboard-dir", metavar="DIR", help="where TensorBoard events go")
    add("--log-jsonl", metavar="FILE", help="one JSON object a step")
    add("--device-peak-tflops", type=POSITIVE, metavar="X",
        help="dense peak of a GPU, or of a rank on a CPU, at the precision of the compute, for MFU (default: bf16's, of GPUs that are known)")  # fmt: skip
    add("--record-memory-history", metavar="FILE", help="the first rank's GPU allocations, for docs.pytorch.org/memory_viz")
    add("--progress-interval", type=POSITIVE_OR_ZERO, default=30.0, metavar="SECONDS",
        help="a step that takes longer shows how far it is: in place on a terminal, else a line every so often; 0: never")  # fmt: skip
    add("--heartbeat-file", metavar="FILE",
        help="where the run is, as JSON replaced every few seconds; with {rank} in the name each rank has one")  # fmt: skip


def _add_profiling(parser):
    group = parser.add_argument_group("profiling", "Traces of some steps; tools/trace_summary.py says where their time went.")
    add = group.add_argument
    add("--profile", action="store_true", help="trace the steps below with torch's profiler")
    add("--profile-step-start", type=COUNT, metavar="STEP",
        help=f"first step to trace (default: {PROFILED_STEP}, or the last of a shorter run)")  # fmt: skip
    add("--profile-step-end", type=COUNT, metavar="STEP",
        help=f"first step not to trace any more (default: {PROFILED_STEPS} steps later)")  # fmt: skip
    add("--profile-ranks", type=COUNT_OR_ZERO, nargs="+", metavar="R",
        help="ranks that write a trace each (default: 0, or the one rehearsed)")  # fmt: skip
    add("--profile-dir", metavar="DIR", help="where the traces go (default: --tensorboard-dir, where its profiler plugin sees them)")


def _add_rehearsal(parser):
    group = parser.add_argument_group("rehearsal", "One rank of a job of any size on one device: its memory and time. No launcher.")
    add = group.add_argument
    add("--rehearse-world-size", type=COUNT, metavar="N", help="GPUs of the job")
    add("--rehearse-rank", type=COUNT_OR_ZERO, default=0, metavar="R", help="which of them")
    add("--rehearse-attention", choices=("real", "stub"), default="real",
        help="stub: take the attention kernel's memory and not its hours")  # fmt: skip
    add("--rehearse-layers", type=COUNT, metavar="K",
        help="only so many layers compute, the others take their memory: a step's peak in little time (default: all)")  # fmt: skip
    add("--rehearse-json", metavar="FILE", help="the report for programs")
