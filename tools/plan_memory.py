"""Predict memory and time of a training job, and ask what would fit. No GPU is needed and nothing is started.

    python tools/plan_memory.py --model llama3-8b --seq-length 5242880 --gpus 8 --gpu-memory-gib 72 --host-memory-gib 200
    python tools/plan_memory.py --model llama3-8b --longest --gpus 8 --gpu-memory-gib 72 --activation-memory lean
    python tools/plan_memory.py --model qwen3-32b --fewest-gpus --seq-length 5242880 --json
    python tools/plan_memory.py --model llama3-8b --seq-length 1048576 --gpus 8 --gpu H200 --calibrate rehearsal.json all_to_all.json
    python tools/plan_memory.py --rehearsal r1.json r2.json
    python tools/plan_memory.py --rehearsal r1.json --measured run1.jsonl

    GPU memory per rank           GiB
      states                    11.22
      …
      buffers                   18.51   layer backward
        k, v                     2.50
        …
      total                     39.23   of 72.00: 32.77 to spare

All flags of pretrain_llama.py that change memory count here as there, and the same checks refuse what cannot run. The layer's own
code is run on PyTorch's meta device and its allocations are counted; a sequence is one document (GPU kernels refuse one of
2^31 / head dim tokens or more: 16.7 million at 128, where --longest ends; many short ones pad the sums of attention's backward, see
docs/attention.md). With --device cpu it is a CPU's run, in fp32 unless --bf16 is given. --context-parallel-size is, unless given,
the largest that divides the GPUs and fits the heads.

Budgets are those of one rank, as in training: a node of 8 GPUs and 1 TiB of host memory has 128 GiB a rank, less what the system
needs. --gpu-memory-gib is all planned with; what CUDA, NCCL and the allocator take comes on top, for which training leaves a
tenth of the GPU when the flag is not given (here: of 80 GiB). The margin shown is such a tenth, or what rehearsals measured.

Time is the counted work, recompute included, by the speeds of --gpu: measured on an H200, estimated for others. --calibrate corrects
them by reports that --rehearse-json of pretrain_llama.py wrote on such a GPU, and the all-to-all, which one GPU cannot rehearse, by a
file {"all_to_all": [{"bytes_per_rank": 268435456, "seconds": 0.0009, "gpus": 8}, …]}. --rehearsal holds the prediction against such
reports, each with its own settings, and says how far it is off; with --measured, the --log-jsonl of a real run of each, rehearsal and
prediction are held against that, over the same steps or scaled to the same documents. Exits with 1 when the job does not fit.
"""

import argparse
import dataclasses
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT
from megacp.checkpointing.huggingface_config import PretrainedError
from megacp.memory.units import GIB
from megacp.model.layer_context import LEAST_TILE
from megacp.planner import Job, table
from megacp.training.activation_plans import GPU_SHARE
from megacp.training.capacity import Outcome, fewest_gpus, kernel_limit, longest_context, parse_planned, plan_job
from megacp.training.measured_runs import against_rehearsal, run_table
from megacp.training.rehearsals import compare, read_rehearsal
from megacp.training.run_logs import read_run
from megacp.training.speeds import Speeds, known_gpu, speeds_from
from megacp.training.step_time import StepTime, predict_step_time

USAGE = """plan_memory.py [--gpus N] [--longest | --fewest-gpus] [--json] [flags of pretrain_llama.py]
       plan_memory.py --rehearsal FILE... [--measured FILE...] [--json]"""
QUIET_S = 5.0  # a longer search says what it does
SMALL = 0.01  # of all buffers: those below are shown together


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=COUNT, metavar="N", help="GPUs of the job")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--longest", action="store_true", help=f"the longest --seq-length that fits, to {LEAST_TILE:,} tokens a rank or one MLP tile if that is less")
    question.add_argument("--fewest-gpus", action="store_true",
        help="the smallest number of GPUs that --seq-length fits on, of the context sizes that the heads allow, the largest doubled on")  # fmt: skip
    question.add_argument("--rehearsal", nargs="+", metavar="FILE", help="reports of rehearsals: predicted against rehearsed peak")
    parser.add_argument("--measured", nargs="+", default=[], metavar="FILE", help="logs of real runs, one for each --rehearsal")
    parser.add_argument("--gpu", metavar="NAME", help="A100, H100, H200 or B200, for its speeds (default: of --calibrate, else H100)")
    parser.add_argument("--calibrate", nargs="+", default=[], metavar="FILE",
        help="reports of rehearsals or measured all-to-alls, to correct speeds with")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object for programs; bytes, seconds and tokens")
    asked, flags = parser.parse_known_args(argv)
    args = parse_planned(flags, USAGE)
    try:
        logs, reports = len(asked.measured), len(asked.rehearsal or [])
        if logs not in (0, reports):
            raise ArgumentError(f"--measured {' '.join(asked.measured)}: {logs} logs for {reports} of --rehearsal; as many work")
        if reports and flags:
            raise ArgumentError(f"{' '.join(flags)}: a --rehearsal is compared by its own settings; without other flags it works")
        if asked.measured:
            compared = list(map(_against_rehearsal, asked.measured, asked.rehearsal, itertools.repeat(asked)))
            print(json.dumps({"runs": compared}, indent=2) if asked.json else "\n".join(run_table(compared)))
            return 0
        if asked.rehearsal:
            compared = [compare(read_rehearsal(file)) for file in asked.rehearsal]
            print(json.dumps({"rehearsals": compared}, indent=2) if asked.json else "\n".join(comparison(compared)))
            return 0
        speeds = speeds_from(asked.gpu, asked.calibrate)
        gpus, seq_length, answer = _answer(asked, args)
        outcome = plan_job(args, gpus, seq_length)
        step_time = predict_step_time(outcome.job, outcome.plans, speeds, micro_batches(outcome, gpus))
    except (ArgumentError, PretrainedError) as error:
        print(f"plan_memory: {error}", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps(answer | record(outcome, gpus, speeds, step_time), indent=2))
    else:
        print("\n".join(report(outcome, gpus, answer, speeds) + time_table(step_time, speeds, outcome.args.context_parallel_size)))
    if outcome.problem:
        print(f"plan_memory: {outcome.problem}", file=sys.stderr)
    return 1 if outcome.problem else 0


def _against_rehearsal(log: str, report: str, asked: argparse.Namespace) -> dict:
    """Time is predicted for the GPU that was rehearsed on; not for a CPU, nor for a GPU whose speeds are not known."""
    rehearsal, speeds = read_rehearsal(report), None
    given = [*(["--gpu", asked.gpu] if asked.gpu else []), *(["--calibrate", *asked.calibrate] if asked.calibrate else [])]
    if known_gpu(rehearsal.device):
        speeds = speeds_from(asked.gpu or rehearsal.device, asked.calibrate)
        if known_gpu(speeds.gpu) != known_gpu(rehearsal.device):
            raise ArgumentError(f"--gpu {asked.gpu} is not what --rehearsal {report} was rehearsed on, {rehearsal.device}; without "
                                "--gpu it works")  # fmt: skip
    elif given:
        where = "a CPU" if rehearsal.device == "cpu" else f"{rehearsal.device}, whose speeds are not known"
        raise ArgumentError(f"--rehearsal {report} was rehearsed on {where}, and {' '.join(given)} tells the speeds of other GPUs; "
                            "without it it works, for memory alone")  # fmt: skip
    return against_rehearsal(read_run(log), rehearsal, speeds)


def _answer(asked: argparse.Namespace, args: argparse.Namespace) -> tuple[int, int, dict[str, int | str]]:
    """GPUs and length of the job to show, and what was searched for by its name in the output."""
    if asked.fewest_gpus == bool(asked.gpus):
        reason = "is what --fewest-gpus asks for; without --gpus" if asked.gpus else "is missing; --gpus 8"
        raise ArgumentError(f"--gpus {f'{asked.gpus} ' if asked.gpus else ''}{reason} works")
    if asked.longest == bool(args.seq_length):
        reason = "is what --longest asks for; without --seq-length" if args.seq_length else "is missing; --seq-length 1048576"
        raise ArgumentError(f"--seq-length {f'{args.seq_length} ' if args.seq_length else ''}{reason} works")
    if asked.longest:
        length, step, ended_by = longest_context(args, asked.gpus, _progress())
        return asked.gpus, length, {"longest_seq_length": length, "step": step, "ended_by": ended_by}
    if asked.fewest_gpus:
        gpus = fewest_gpus(args, args.seq_length)
        return gpus, args.seq_length, {"fewest_gpus": gpus}
    return asked.gpus, args.seq_length, {}


def _progress() -> Callable[[int], None]:
    """Says on standard error which length is looked at, once a search takes long."""
    start = time.monotonic()

    def look(tokens: int) -> None:
        seconds = time.monotonic() - start
        if seconds > QUIET_S:
            print(f"plan_memory: {seconds:.0f} s; counting {tokens:,} tokens", file=sys.stderr, flush=True)

    return look


def notes(args: argparse.Namespace) -> list[str]:
    """What the plan leaves out: a sequence that no kernel takes as one document."""
    limit = kernel_limit(args)
    if limit is None or args.seq_length <= limit:
        return []
    then = "with --attention-mask causal it cannot run" if args.attention_mask == "causal" else "in shorter documents it can run"
    return [f"a GPU's attention kernels take {limit:,} tokens of one document, less than --seq-length {args.seq_length}; {then}"]


def micro_batches(outcome: Outcome, gpus: int) -> int:
    """Forward and backward passes of a step."""
    args = outcome.args
    return args.global_batch_size // (args.micro_batch_size * (gpus // args.context_parallel_size))


def margin(outcome: Outcome, speeds: Speeds) -> int:
    """Bytes for CUDA, NCCL and what the allocator holds beyond what is used."""
    share = 1 / GPU_SHARE - 1 if speeds.allocator_margin is None else speeds.allocator_margin
    return round(share * outcome.prediction.device_bytes)


def report(outcome: Outcome, gpus: int, answer: dict[str, int | str], speeds: Speeds) -> list[str]:
    """Lines for a person; GiB of one rank."""
    args, job, prediction = outcome.args, outcome.job, outcome.prediction
    schedule = job.schedule
    lines = []
    if "longest_seq_length" in answer:
        more = f"{answer['step']:,} more do not fit"
        if answer["ended_by"] == "kernel":
            more = f"the kernel ends it, not the memory: a GPU's attention takes {kernel_limit(args):,} tokens of one document"
        lines += [f"longest context: {answer['longest_seq_length']:,} tokens; {more}", ""]
    if "fewest_gpus" in answer:
        lines += [f"fewest GPUs: {gpus}", ""]
    chunk = f", query chunks of {job.query_chunk:,}" if job.query_chunk else ""
    lines += [
        f"{job.config.name}, {args.seq_length:,} tokens on {gpus} GPUs: context {args.context_parallel_size} x data "
        f"{gpus // args.context_parallel_size}, {job.tokens:,} tokens a rank; "
        f"{schedule.heads_per_stage} of {schedule.num_heads} heads a stage{chunk}, MLP tiles of {job.tile_size:,}; "
        f"{_dtype(job)}",
        "",
        f"{'GPU memory per rank':22}{'GiB':>10}",
        *(f"  {name:20}{bytes_ / GIB:10.2f}" for name, bytes_ in prediction.parts.items() if name != "buffers"),
        f"  {'buffers':20}{prediction.parts['buffers'] / GIB:10.2f}   {prediction.moment}",
        *(f"    {name:24}{bytes_ / GIB:8.2f}" for name, bytes_ in _shown(prediction.buffers).items()),
        _total("total", prediction.device_bytes, args.gpu_memory_gib),
        f"  {'allocator margin':20}{margin(outcome, speeds) / GIB:10.2f}   on top",
        "",
        f"{'elsewhere, per rank':22}{'GiB':>10}",
        _total("host", prediction.host_bytes, args.host_memory_gib),
        *([f"    of it states     {job.host_state_bytes / GIB:11.2f}"] if job.states_on_host else []),
        _total("disk", prediction.disk_bytes, args.disk_memory_gib),
        "",
        f"plan: --activation-memory {args.activation_memory} --recompute-granularity {args.recompute_granularity}",
        *(f"  {line}" for line in table(outcome.plans)),
        *(f"note: {note}" for note in notes(args)),
    ]
    return lines


def _dtype(job: Job) -> str:
    return str(job.dtype).removeprefix("torch.")


def _shown(buffers: dict[str, int]) -> dict[str, int]:
    """The largest first; small ones together."""
    limit = SMALL * sum(buffers.values())
    shown = {name: bytes_ for name, bytes_ in sorted(buffers.items(), key=lambda item: -item[1]) if bytes_ >= limit}
    others = sum(buffers.values()) - sum(shown.values())
    return shown | ({"others": others} if others else {})


def time_table(time: StepTime, speeds: Speeds, gpus: int) -> list[str]:
    """Lines for a person: seconds of a step by part; what hides behind other work takes none. `gpus`: that exchange heads."""
    return [
        "",
        f"{'time of a step':22}{'seconds':>10}{'share':>8}",
        *(f"  {part:20}{seconds:10.3f}{seconds / time.seconds:8.1%}" for part, seconds in time.parts.items() if seconds),
        f"  {'step':20}{time.seconds:10.3f}   {time.tokens_per_s_per_gpu:,.1f} tokens/s/GPU, {time.mfu:.1%} MFU",
        f"speeds of {speeds.gpu}: {speeds.source_text(gpus)}",
    ]


def comparison(compared: list[dict]) -> list[str]:
    """Lines for a person, one a file, and the worst error."""
    width = max(len(one["file"]) for one in compared)
    lines = [f"{'file':{width}}  {'tokens a rank':>13}{'predicted GiB':>15}{'rehearsed GiB':>15}{'error':>9}   predicted in; job"]
    for one in compared:
        predicted, rehearsed = one["predicted_bytes"] / GIB, one["rehearsed_bytes"] / GIB
        lines.append(
            f"{one['file']:{width}}  {one['tokens_per_rank']:13,}{predicted:15.3f}{rehearsed:15.3f}{one['error']:+9.2%}   "
            f"{one['moment']}; {one['job']}"
        )
    return [*lines, f"worst of {len(compared)}: {max((one['error'] for one in compared), key=abs):+.2%}"]


def _total(name: str, bytes_: int, budget: float | None) -> str:
    line = f"  {name:20}{bytes_ / GIB:10.2f}"
    if budget is None:
        return line
    left = budget - bytes_ / GIB
    return f"{line}   of {budget:.2f}: {f'{left:.2f} to spare' if left >= 0 else f'{-left:.2f} too much'}"


def record(outcome: Outcome, gpus: int, speeds: Speeds, time: StepTime) -> dict:
    """The same for programs; bytes of one rank. `plans` has one a layer."""
    args, job, prediction = outcome.args, outcome.job, outcome.prediction
    return {
        "model": job.config.name,
        "seq_length": args.seq_length,
        "gpus": gpus,
        "context_parallel_size": args.context_parallel_size,
        "upipe_heads_per_stage": job.schedule.heads_per_stage,
        "upipe_query_chunk": job.query_chunk,
        "mlp_tile_size": job.tile_size,
        "dtype": _dtype(job),
        "tokens_per_rank": job.tokens,
        "unit_bytes": job.unit,
        "gpu_parts_bytes": prediction.parts,
        "gpu_buffers_bytes": prediction.buffers,
        "gpu_peak_moment": prediction.moment,
        "gpu_bytes": prediction.device_bytes,
        "allocator_margin_bytes": margin(outcome, speeds),
        "host_bytes": prediction.host_bytes,
        "host_state_bytes": job.host_state_bytes,
        "disk_bytes": prediction.disk_bytes,
        "budgets_gib": {name: getattr(args, f"{name}_memory_gib") for name in ("gpu", "host", "disk")},
        "plans": [dataclasses.asdict(plan) for plan in outcome.plans],
        "problem": outcome.problem,
        "notes": notes(args),
        "step_seconds": time.seconds,
        "step_parts_seconds": time.parts,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
        "executed_flops_per_gpu": time.executed_flops,
        "speeds": {"gpu": speeds.gpu} | speeds.sources | {"all_to_all_gpus": sorted(speeds.all_to_all)},
    }


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # where a reader such as `head` is gone, this ends too
    sys.exit(main())
