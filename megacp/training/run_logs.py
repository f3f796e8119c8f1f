"""What a --log-jsonl says of its job and of each step: written by a run, read to hold the run against a rehearsal.

    log_head(job, plans, micro_batches=1, device="NVIDIA H200", args)        # in the first record of each start of the run
    # {"job": {"model": {…}, "ranks": 8, "upipe_heads_per_stage": 8, …, "plans": […]}, "profiled_steps": [10, 11]}

    run = read_run("run.jsonl")
    run.steps[1].seconds, run.steps[1].attention_pairs(config)               # 12.34, 5.5e11
    check_same_job(run, rehearsal)                                           # ArgumentError: of other --upipe-heads-per-stage
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.memory.policy import LayerPlan
from megacp.model.config import ModelConfig
from megacp.planner import Job
from megacp.training.metrics import attention_flops, model_flops_per_step
from megacp.training.rehearsals import Rehearsal, check_positive, job_settings, parse_finite

NAMES_ONLY = ("model.name", "model.init_method_std")  # what changes no time and no memory
SOURCE = "a file that --log-jsonl of pretrain_llama.py writes works"


def log_head(job: Job, plans: list[LayerPlan], micro_batches: int, device: str, args: argparse.Namespace) -> dict:
    return {"job": _described(job, plans, micro_batches, device), "profiled_steps": profiled_steps(args)}


def profiled_steps(args: argparse.Namespace) -> list[int]:
    """Slower than others, as is the one before them, in which the profiler warms up."""
    return list(range(args.profile_step_start, min(args.profile_step_end, args.train_iters + 1))) if args.profile else []


def _described(job: Job, plans: list[LayerPlan], micro_batches: int, device: str) -> dict:
    dtype = str(job.dtype).removeprefix("torch.")
    return {"ranks": job.sharding_ranks, "dtype": dtype, "device": device} | job_settings(job, plans, micro_batches)


@dataclass(frozen=True)
class LoggedStep:
    number: int
    tokens: int  # over all ranks
    ranks: int
    seconds: float
    model_flops: float  # of all ranks
    peak_gib: float | None  # None on a CPU
    cold: bool  # the first of a start of the run: compiles and warms up
    profiled: bool

    def attention_pairs(self, config: ModelConfig) -> float:
        """(query, key) pairs of all its documents, as its FLOPs tell."""
        return (self.model_flops - model_flops_per_step(config, self.tokens, 0)) / (3 * attention_flops(config, 1))


@dataclass(frozen=True)
class MeasuredRun:
    path: str
    steps: list[LoggedStep]
    job: dict | None  # None: a log that does not tell
    notes: list[str]

    @property
    def tokens(self) -> int:
        return self.steps[0].tokens

    @property
    def peak_gib(self) -> float | None:
        peaks = [step.peak_gib for step in self.steps]
        return None if None in peaks else max(peaks)


def read_run(path: str) -> MeasuredRun:
    """Raises ArgumentError, naming the line, for what --log-jsonl did not write and for steps of several jobs."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ArgumentError(f"--measured {path} cannot be read ({error.strerror}); {SOURCE}") from None
    except ValueError as error:
        raise ArgumentError(f"--measured {path} is no text ({error}); {SOURCE}") from None
    steps, job, profiled, notes = [], None, set(), []
    for number, record in _records(path, lines, notes):
        try:
            if "job" in record:
                _check_one_job(job, record["job"], told_before=job is not None or not steps, step=record["step"])
                job = record["job"]
                profiled = set(record.get("profiled_steps", []))
            steps.append(_step(record, cold="job" in record or not steps, profiled=profiled))
            _check_order(steps)
        except KeyError as error:
            raise ArgumentError(f"--measured {path}: line {number} has no {error}, so it is no step; {SOURCE}") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ArgumentError(f"--measured {path}: line {number}: {error}; {SOURCE}") from None
    if not steps:
        raise ArgumentError(f"--measured {path} holds no step; {SOURCE}, after the run's first step")
    return MeasuredRun(path, steps, job, notes)


def _records(path: str, lines: list[str], notes: list[str]) -> Iterator[tuple[int, dict]]:
    """Line numbers and records. A last line without its end is what a killed run leaves, and only noted."""
    *lines, rest = lines
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            record = parse_finite(line)
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__}, not an object")
        except ValueError as error:
            if number > len(lines):
                notes.append(f"{path}: line {number} is cut off, as when a run is killed, and left out")
                return
            what = f"not JSON: {error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ArgumentError(f"--measured {path}: line {number} is no record of a step ({what}); {SOURCE}") from None
        yield number, record


def _step(record: dict, cold: bool, profiled: set[int]) -> LoggedStep:
    keys = ("step", "tokens", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
    number, tokens, seconds, speed, tflops = (check_positive(name, record[name]) for name in keys)
    peak = record["peak_memory_gib"]
    ranks = round(tokens / (seconds * speed))
    return LoggedStep(
        number, tokens, ranks, seconds, tflops * 1e12 * seconds * ranks,
        None if peak is None else check_positive("peak_memory_gib", peak), cold, number in profiled,
    )  # fmt: skip


def _check_order(steps: list[LoggedStep]) -> None:
    *_, last = steps
    first, before = steps[0], steps[-2] if len(steps) > 1 else None
    if before is not None and last.number <= before.number:
        raise ValueError(f"step {last.number} after step {before.number}: more than one run; the log of one works")
    for name in ("tokens", "ranks"):
        if getattr(last, name) != getattr(first, name):
            raise ValueError(f"step {last.number} is of {getattr(last, name):,} {name}, step {first.number} of "
                             f"{getattr(first, name):,}: more than one job; the log of one works")  # fmt: skip


def _check_one_job(before: dict | None, now: dict, told_before: bool, step: int) -> None:
    if before is None:
        if not told_before:
            raise ValueError(f"step {step} tells of its job and those before it do not: it may be another; the log of one run works")
        return
    if (found := difference(before, now)) is not None:
        name, was, is_ = found
        raise ValueError(f"from step {step} on {name} is {is_}, before it was {was}: more than one job; the log of one works")


def check_same_job(run: MeasuredRun, rehearsal: Rehearsal) -> list[str]:
    """Raises ArgumentError that names the setting in which they differ. Returns notes of what cannot be checked."""
    job = rehearsal.job
    expected = {"tokens": job.tokens * job.sharding_ranks * rehearsal.micro_batches, "ranks": job.sharding_ranks}
    known = {"tokens": run.tokens, "ranks": run.steps[0].ranks}
    described = _described(job, rehearsal.plans, rehearsal.micro_batches, rehearsal.device)
    found = (run.job and difference(run.job, described)) or difference(known, expected)
    if found:
        name, logged, rehearsed = found
        raise ArgumentError(
            f"--measured {run.path} is of a job with {name} {logged}, --rehearsal {rehearsal.path} of one with {name} {rehearsed}; "
            "a log and a rehearsal of the same flags work"
        )
    one_document = rehearsal.whole_pairs * job.sharding_ranks // job.schedule.ulysses_degree
    if not all(0 < step.attention_pairs(job.config) <= one_document * (1 + 1e-6) for step in run.steps):
        raise ArgumentError(
            f"--measured {run.path} has steps of other FLOPs than {job.config.name} of --rehearsal {rehearsal.path} has; "
            "a log and a rehearsal of the same flags work"
        )
    return [] if run.job else [f"{run.path} does not tell of its job: whether the rehearsal is of the same cannot be checked"]


def difference(one: dict | list, other: dict | list, place: str = "") -> tuple[str, object, object] | None:
    """The first entry in which they differ, and the two values.

    >>> difference({"a": 1, "plans": [{"h": "gpu"}]}, {"a": 1, "plans": [{"h": "host"}]})
    ('plans[0].h', 'gpu', 'host')
    """
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{place}.{key}".lstrip("."), one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other])]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{place}[{index}]", *both) for index, both in enumerate(zip(one, other))]
    else:
        return None if one == other or place in NAMES_ONLY else (place, one, other)
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)
