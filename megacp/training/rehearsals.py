"""A rehearsal's report as a file, and the job of it again, to hold a prediction against or to correct speeds with.

    python pretrain_llama.py --rehearse-world-size 8 … --rehearse-json r.json

    rehearsal = read_rehearsal("r.json")
    predict(rehearsal.job, rehearsal.plans).device_bytes, rehearsal.peak        # 41.2e9, 41.5e9
    rehearsal.part_seconds["attention"], rehearsal.step_seconds
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megacp.argument_checks import ArgumentError
from megacp.checkpointing.weights import config_from_json, config_to_json
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention.stub import STUBS
from megacp.memory.policy import LayerPlan
from megacp.planner import Job, predict

STUB = "stub-"
TIMED_PARTS = ("projections", "attention", "mlp", "head")  # of `part_seconds`, beside others


@dataclass(frozen=True)
class RehearsedStep:
    number: int
    seconds: float
    attention_pairs: int
    profiled: bool

    @property
    def cold(self) -> bool:
        return self.number == 1


@dataclass(frozen=True)
class Rehearsal:
    """What a report says of a job. Bytes of the rank, seconds of its last step; `attention_pairs` of all its micro-batches."""

    path: str
    device: str
    job: Job
    plans: list[LayerPlan]
    micro_batches: int
    attention: str  # the backend; "stub-…" computed nothing
    attention_pairs: int
    peak: int
    reserved: int | None
    step_seconds: float
    part_seconds: dict[str, float]
    copy_bytes_per_s: float | None
    computing_layers: int | None = None  # None: all. The others only took their memory
    steps: tuple[RehearsedStep, ...] = ()  # none: a report that tells of the last step only

    @property
    def few_computed(self) -> bool:
        """Whether some layers only took their memory: the peak is the job's, but neither its seconds nor the allocator's share."""
        return self.computing_layers not in (None, self.job.config.num_layers)

    @property
    def not_timed(self) -> str | None:
        """Why its seconds are not those of the job's step; None: they are."""
        if self.few_computed:
            return f"{self.computing_layers} of {self.job.config.num_layers} layers computed"
        return "attention was a stub" if self.attention.startswith(STUB) else None

    @property
    def pairs_share(self) -> float:
        """Attention pairs of the step in those of sequences that are one document each."""
        return self.attention_pairs / self.whole_pairs

    @property
    def whole_pairs(self) -> int:
        """Attention pairs of a step of the rank's sequences, were each one document."""
        job = self.job
        length = job.schedule.ulysses_degree * job.tokens // job.sequences
        return self.micro_batches * job.sequences * (length * (length + 1) // 2)


def job_settings(job: Job, plans: list[LayerPlan], micro_batches: int) -> dict:
    """What reports and logs say of the job, beside the ranks, the dtype and the device that they name for people too."""
    return {
        "model": config_to_json(job.config),
        "context_parallel_size": job.schedule.ulysses_degree,
        "upipe_heads_per_stage": job.schedule.heads_per_stage,
        "upipe_query_chunk": job.query_chunk,
        "mlp_tile_size": job.tile_size,
        "loss_tile_size": job.loss_tile_size,
        "micro_batch_size": job.sequences,
        "seq_length": job.tokens * job.schedule.ulysses_degree // job.sequences,
        "micro_batches": micro_batches,
        "optimizer_cpu_offload": job.states_on_host,
        "plans": [dataclasses.asdict(plan) for plan in plans],
    }


def compare(rehearsal: Rehearsal) -> dict:
    """The predicted peak beside the rehearsed one, in bytes, and the error as a share of the latter."""
    job = rehearsal.job
    if rehearsal.device == "cpu":  # where the host's memory is the device's
        job = dataclasses.replace(job, states_on_host=False)
    predicted = predict(job, rehearsal.plans)
    plans = dict.fromkeys("/".join(str(place) for place in dataclasses.astuple(plan)[:4]) for plan in rehearsal.plans)
    layers = job.config.num_layers
    few = f" ({rehearsal.computing_layers} computed)" if rehearsal.computing_layers not in (None, layers) else ""
    chunk = f", chunks of {job.query_chunk:,}" if job.query_chunk else ""
    return {
        "file": rehearsal.path,
        "job": f"{job.config.name}, {layers} layers{few}, 1 of {job.sharding_ranks} ranks, U {job.schedule.heads_per_stage}"
        f"{chunk}, h/output/lse/gradient on {' and '.join(plans)}; {rehearsal.attention}, {rehearsal.device}",
        "tokens_per_rank": job.tokens,
        "predicted_bytes": predicted.device_bytes,
        "rehearsed_bytes": rehearsal.peak,
        "error": predicted.device_bytes / rehearsal.peak - 1,
        "moment": predicted.moment,
    }


def read_rehearsal(path: str) -> Rehearsal:
    """Raises ArgumentError that says what is wrong with the file and what works."""
    report = read_json(path, "--rehearse-json of pretrain_llama.py")
    try:
        return _rehearsal(path, report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else f"cannot be used ({error})"
        raise ArgumentError(
            f"{path} {missing}, so it is no rehearsal's report; a file that --rehearse-json of pretrain_llama.py writes works"
        ) from None


def read_json(path: str, source: str) -> dict:
    """The object in a file. Raises ArgumentError naming what would write one."""
    try:
        report = parse_finite(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read ({error.strerror}); a file of {source} works") from None
    except ValueError as error:
        problem = "is not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else "cannot be used"
        raise ArgumentError(f"{path} {problem} ({error}); a file of {source} works") from None
    if not isinstance(report, dict):
        raise ArgumentError(f"{path} holds a {type(report).__name__}, not an object; a file of {source} works")
    return report


def parse_finite(text: str):
    """The value of a JSON text. Raises ValueError, naming the place, for a number that is not finite: no clock gives one."""
    value = json.loads(text)
    _check_finite(value, "")
    return value


def _check_finite(value, place: str) -> None:
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(inner, f"{place}[{name}]" if isinstance(value, list) else f"{place}.{name}".lstrip("."))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place or 'it'} is {value}")


def check_positive(name: str, value: float, or_zero: bool = False) -> float:
    """`value`. Raises ValueError when it is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{name} is {value}, not {'0 or more' if or_zero else 'above 0'}")
    return value


def _check_numbers(report: dict) -> None:
    for name in ("attention_pairs", "micro_batches"):
        check_positive(f"settings.{name}", report["settings"][name])
    for name in ("world_size", "tokens_per_rank", "peak", "step_seconds"):
        check_positive(name, report[name])
    for name in ("reserved", "copy_bytes_per_s"):
        if report[name] is not None:
            check_positive(name, report[name])
    for name in dict.fromkeys([*TIMED_PARTS, *report["part_seconds"]]):
        check_positive(f"part_seconds.{name}", report["part_seconds"][name], or_zero=True)
    for step in report.get("steps", []):
        for name in ("step", "seconds", "attention_pairs"):
            check_positive(f"steps: {name}", step[name])


def _rehearsal(path: str, report: dict) -> Rehearsal:
    _check_numbers(report)
    settings = report["settings"]
    config, ranks = config_from_json(settings["model"]), settings["context_parallel_size"]
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, ranks, settings["upipe_heads_per_stage"])
    kernel = report["attention"].removeprefix(STUB)
    job = Job(
        config, schedule, report["tokens_per_rank"], report["world_size"], settings["mlp_tile_size"], settings["loss_tile_size"],
        getattr(torch, report["dtype"]), settings["upipe_query_chunk"], kernel if f"{STUB}{kernel}" in STUBS else "fa4",
        settings["micro_batches"] > 1, settings["optimizer_cpu_offload"], settings["micro_batch_size"],
    )  # fmt: skip
    steps = (RehearsedStep(one["step"], one["seconds"], one["attention_pairs"], one["profiled"]) for one in report.get("steps", []))
    return Rehearsal(
        path, report["device"], job, [LayerPlan(**plan) for plan in settings["plans"]], settings["micro_batches"], report["attention"],
        settings["attention_pairs"], report["peak"], report["reserved"], report["step_seconds"], report["part_seconds"],
        report["copy_bytes_per_s"], settings.get("rehearsed_layers"), tuple(steps),
    )  # fmt: skip
