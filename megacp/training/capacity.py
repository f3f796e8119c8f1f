"""What a job takes and what would still fit, from the flags of training and a number of GPUs; nothing is started.

    args = parse_planned("--model llama3-8b --gpu-memory-gib 80 --activation-memory lean".split(), usage="…")
    outcome = plan_job(args, gpus=8, seq_length=5242880)
    outcome.prediction.device_bytes, outcome.problem                   # 42.1e9, None
    longest_context(args, gpus=8)                    # tokens, a multiple of 8,192 or a tile x context size; its step; what ends it
    fewest_gpus(args, seq_length=5242880)

Flags are checked, heads scheduled, plans chosen and memory counted by what training calls, for a GPU or, with --device cpu, for
the CPU's fp32. Budgets are those of one rank. Counting takes seconds, whatever the length, but for query chunks of several
documents, so searches begin where a line through two small jobs says the answer is. What they return was counted itself; one step
more was counted not to fit, or is more than the attention kernels of a GPU take of one document, as which a sequence is counted.
"""

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megacp.argument_checks import ArgumentError
from megacp.arguments import build_parser, model_config_from_args, resolve_precision, tile_size_of, validate_args
from megacp.context_parallel.head_schedule import build_head_schedule, legal_ulysses_degrees
from megacp.kernels.attention.calls import longest_document
from megacp.memory.policy import DISK, LayerPlan, plan_of
from megacp.memory.store import planned_bytes
from megacp.memory.units import GIB
from megacp.model.layer_context import LEAST_TILE
from megacp.parallel_state import ParallelLayout
from megacp.planner import Job, Prediction, choose_plans, predict
from megacp.training.activation_plans import GPU_SHARE, activation_plans, check_budgets, memory_job

ASSUMED_GPU_GIB = 80  # without a flag of GPU memory: the share of such a GPU that training would plan with
MOST_GPUS = 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """A job with its plans and predicted memory. `problem`: why it does not fit and what would, or None."""

    args: argparse.Namespace
    job: Job
    plans: list[LayerPlan]
    prediction: Prediction
    problem: str | None


def parse_planned(flags: list[str], usage: str) -> argparse.Namespace:
    """The flags of training; what plans nothing may be left out (data, a disk's directory). Open: length, context size."""
    parser = build_parser()
    parser.usage = usage
    parser.set_defaults(seq_length=None, context_parallel_size=None)
    args = parser.parse_args(flags)
    args.limits_gpu = args.gpu_memory_gib is None and args.gpu_memory_limit_gib is not None  # the flag that errors name
    if args.gpu_memory_gib is None:
        args.gpu_memory_gib = GPU_SHARE * (args.gpu_memory_limit_gib or ASSUMED_GPU_GIB)
    if not args.data_path and not args.train_data_path:
        args.mock_data = True
    if args.disk_memory_gib is not None or args.activation_memory == "disk":
        args.disk_offload_dir = args.disk_offload_dir or "disk"
    return args


def job_of(args: argparse.Namespace, gpus: int, seq_length: int) -> tuple[argparse.Namespace, Job]:
    """Checked flags, filled in, and one rank's job. An open context size: the largest that divides the GPUs and fits the heads."""
    args = copy.copy(args)
    args.seq_length = seq_length
    config = model_config_from_args(args)
    args.context_parallel_size = _context_size(args, gpus)
    validate_args(args, gpus)
    layout = ParallelLayout(gpus, args.context_parallel_size)
    heads = config.num_attention_heads, config.num_query_groups, layout.ulysses_degree, args.upipe_heads_per_stage
    dtype = resolve_precision(args, "cuda" if args.device == "auto" else args.device)
    return args, memory_job(args, config, layout, build_head_schedule(*heads), dtype)


def _context_size(args: argparse.Namespace, gpus: int) -> int:
    if args.context_parallel_size is not None:
        return args.context_parallel_size
    config = model_config_from_args(args)
    return max(size for size in legal_ulysses_degrees(config.num_attention_heads, config.num_query_groups) if gpus % size == 0)


def plan_job(args: argparse.Namespace, gpus: int, seq_length: int) -> Outcome:
    """Raises ArgumentError for flags that cannot run at all; what runs but does not fit is an outcome with a problem."""
    args, job = job_of(args, gpus, seq_length)
    plans, problem = least_plans(args, job), None
    if predict(job, plans).device_bytes <= args.gpu_memory_gib * GIB:
        try:
            plans = activation_plans(args, job, CPU)
            check_budgets(args, plans, job)
        except ArgumentError as error:
            problem = f"{error}{_larger_host(args, job)}"
    prediction = predict(job, plans)
    if prediction.device_bytes > args.gpu_memory_gib * GIB:
        problem = _larger_gpu(args, prediction.device_bytes, gpus)
    return Outcome(args, job, plans, prediction, problem)


def _larger_gpu(args: argparse.Namespace, bytes_: int, gpus: int) -> str:
    """That a rank takes `bytes_`, more than planned with, by the flag that was given, and what works."""
    flag, given, share = "--gpu-memory-gib", args.gpu_memory_gib, 1
    if args.limits_gpu:
        flag, given, share = "--gpu-memory-limit-gib", args.gpu_memory_limit_gib, GPU_SHARE
    needed, enough = (math.ceil(100 * bytes_ / GIB / part) / 100 for part in (1, share))
    planned = f", of which {args.gpu_memory_gib:g} are planned with," if args.limits_gpu else ""
    how, other = f"--activation-memory {args.activation_memory}", ""
    if args.recompute_granularity == "none":
        how = "--recompute-granularity none, which keeps all on the GPU"
        selective = argparse.Namespace(**vars(args) | {"recompute_granularity": "selective"})
        other = " or --recompute-granularity selective" if fits(selective, gpus, args.seq_length) else ""
    elif args.activation_memory == "auto":
        how += ", all activations elsewhere"
    return f"{flag} {given:g}{planned} is less than the {needed:.2f} GiB that one rank takes with {how}; {enough:.2f}{other} works"


def _larger_host(args: argparse.Namespace, job: Job) -> str:
    """With auto, the --host-memory-gib that would do."""
    if args.activation_memory != "auto" or args.host_memory_gib is None:
        return ""
    plans = choose_plans(job, int(args.gpu_memory_gib * GIB), None, 0, args.recompute_granularity == "full", args.upipe_prefetch)
    return f"; --host-memory-gib {-(-100 * job.host_bytes(plans) // GIB) / 100:.2f} works"


def least_plans(args: argparse.Namespace, job: Job) -> list[LayerPlan]:
    """The plans that take least of the GPU: of auto the last that it tries, else the one that --activation-memory names."""
    least = "gpu" if args.recompute_granularity == "none" else "lean"
    memory = least if args.activation_memory == "auto" else args.activation_memory
    return [plan_of(memory, args.recompute_granularity, args.upipe_prefetch)] * job.config.num_layers


def fits(args: argparse.Namespace, gpus: int, seq_length: int) -> bool:
    """Whether a plan is within all budgets; as `plan_job` says, without looking for the fastest when the leanest fits."""
    args, job = job_of(args, gpus, seq_length)
    plans = least_plans(args, job)
    if predict(job, plans).device_bytes > args.gpu_memory_gib * GIB:
        return False
    try:
        check_budgets(args, plans, job)
        return True
    except ArgumentError:
        return args.activation_memory == "auto" and plan_job(args, gpus, seq_length).problem is None


def kernel_limit(args: argparse.Namespace) -> int | None:
    """Tokens of the longest sequence, one document, that a GPU's attention kernels take; None: of any length."""
    if args.device == "cpu" or args.attention_backend == "reference":
        return None
    return longest_document(model_config_from_args(args).kv_channels)


def longest_context(args: argparse.Namespace, gpus: int, look: Callable[[int], None] = lambda tokens: None) -> tuple[int, int, str]:
    """The longest --seq-length that fits, the step between lengths looked at, and what ends it: "memory" or "kernel".

    A step is 8,192 tokens more on every rank, or one MLP tile if that is less. `look` is told each length before it is counted, which may take a while.
    """
    limit = kernel_limit(args)
    of_rank = min(LEAST_TILE, tile_size_of(args, model_config_from_args(args)))
    step = of_rank * _context_size(args, gpus)
    filled, job = job_of(args, gpus, step)
    ceiling = int(args.gpu_memory_gib * GIB) // job.unit  # a rank holds one hidden state of its tokens at least
    if limit is not None:
        if limit < step:
            raise ArgumentError(
                f"--seq-length {step} is the least with {of_rank} tokens a rank, and a GPU's attention kernels take "
                f"{limit:,} tokens of one document; a smaller --mlp-tile-size works"
            )
        ceiling = min(ceiling, limit // step)
    # Bytes grow along a few lines, one a kind of peak: go on from where the last line met the budget.
    (tokens, taken), (far, taken_far) = _small_jobs(filled, job)
    for _ in range(4):
        guess = int(far + (args.gpu_memory_gib * GIB - taken_far) * (far - tokens) / (taken_far - taken)) // job.tokens
        guess = min(max(guess, 1), ceiling)
        if guess * job.tokens in (tokens, far):
            break
        (tokens, taken), far = (far, taken_far), guess * job.tokens
        look(guess * step)
        taken_far = _taken(filled, replace(job, tokens=far))

    def fitting(steps: int) -> bool:
        look(steps * step)
        return fits(args, gpus, steps * step)

    found = largest(fitting, guess, ceiling)
    if not found:
        problem = plan_job(args, gpus, step).problem
        raise ArgumentError(f"not even --seq-length {step} fits: {problem}; with a smaller --mlp-tile-size shorter ones are tried")
    return found * step, step, "kernel" if limit is not None and found == limit // step else "memory"


def fewest_gpus(args: argparse.Namespace, seq_length: int) -> int:
    """The smallest of `gpu_counts` on which `seq_length` tokens fit. Raises ArgumentError when none does or no count can run."""
    candidates, refusal = [], None
    for count in gpu_counts(args):
        try:
            candidates.append((count, *job_of(args, count, seq_length)))
        except ArgumentError as error:
            refusal = refusal or error
    if not candidates:
        raise refusal
    guess = next((i for i, (_, filled, job) in enumerate(candidates) if _seems_to_fit(filled, job)), len(candidates))
    too_few = largest(lambda index: not fits(args, candidates[index - 1][0], seq_length), guess, len(candidates))
    if too_few == len(candidates):
        count = candidates[-1][0]
        raise ArgumentError(f"--seq-length {seq_length} does not fit on {count} GPUs: {plan_job(args, count, seq_length).problem}")
    return candidates[too_few][0]


def gpu_counts(args: argparse.Namespace) -> list[int]:
    """Numbers of GPUs worth asking about, ascending: the context sizes that fit the heads, and the largest of them doubled on.

    Beyond it more GPUs only share the states further. A given --context-parallel-size: that one, doubled on.
    """
    config = model_config_from_args(args)
    sizes = legal_ulysses_degrees(config.num_attention_heads, config.num_query_groups)
    counts = [args.context_parallel_size] if args.context_parallel_size else sizes
    while counts[-1] * 2 <= MOST_GPUS:
        counts = [*counts, counts[-1] * 2]
    return counts


def _taken(args: argparse.Namespace, job: Job) -> int:
    """Bytes of the GPU with the plans that take least of it, and what host and disk have no room for."""
    plans = least_plans(args, job)
    away = job.host_bytes(plans) + planned_bytes(plans, job.geometry, DISK)
    budgets = (args.host_memory_gib, args.disk_memory_gib if args.disk_offload_dir else 0)
    room = sum(float("inf") if gib is None else gib * GIB for gib in budgets)
    return predict(job, plans).device_bytes + max(0, away - room)


def _small_jobs(args: argparse.Namespace, job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens of a rank and bytes taken, twice: none, which leaves states and weights, and a few tiles."""
    few = replace(job, tokens=8 * job.sequences * max(job.query_chunk or 0, job.tile_size, job.loss_tile_size))
    parts = predict(few, least_plans(args, few)).parts
    return (0, sum(parts.values()) - parts["buffers"] - parts["kept activations"]), (few.tokens, _taken(args, few))


def _seems_to_fit(args: argparse.Namespace, job: Job) -> bool:
    """By the line through two small jobs. Where a search begins, not where it ends."""
    (_, taken), (tokens, taken_far) = _small_jobs(args, job)
    return taken + (taken_far - taken) * job.tokens / tokens <= args.gpu_memory_gib * GIB


def largest(holds: Callable[[int], bool], guess: int, ceiling: int) -> int:
    """The largest number in [1, ceiling] that `holds`, 0 if none; it holds up to there, not beyond. Asks near `guess` first.

    >>> asked = []
    >>> largest(lambda n: asked.append(n) or n <= 700, guess=699, ceiling=10**6), asked
    (700, [699, 700, 702, 701])
    """
    low, high, at, stride = 0, ceiling + 1, guess, 1
    while high - low > 1:
        if not low < at < high:
            at = (low + high) // 2
        if holds(at):
            low, at = at, at + stride
        else:
            high, at = at, at - stride
        stride *= 2
    return low
