"""A rung of the memory ladder, measured: its job rehearsed in a process of its own, with as many layers as time allows.

    rehearsals = LadderRehearsals(flags, context_parallel_size=8, seq_length=1048576, device="cuda", layers=4, folder=folder)
    measured = rehearsals.measure(rung, seconds=120)      # NotMeasured: "out of GPU memory: …", "not done after 120 s"
    measured.bytes, measured.layers, measured.predicted   # 22.4e9, 4, 22.3e9

A rehearsal of 4 of 32 layers has their whole working set at its true size; what grows with the number of layers is states,
gradients and kept activations. So to the measured peak of each phase comes the planner's difference between 32 layers and 4 in that
phase, which is made of these alone, and the highest phase is the bar. With all layers rehearsed nothing is added. On a CPU
allocations are counted.

The folder has a rung's report and log, `query-chunks.json` and `query-chunks.log`. With `resume` a report that is there already is
taken for its rung when it is of the same job on the same kind of device; without a device nothing is rehearsed, and a report from
any, of any number of layers, is taken.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from megacp.argument_checks import ArgumentError
from megacp.memory.policy import PLANS, LayerPlan, plan_of
from megacp.planner import Job, Prediction, predict, predict_phases
from megacp.planning.ladder import Rung
from megacp.training.rehearsals import read_json, read_rehearsal

PROGRAM = Path(__file__).parents[2] / "pretrain_llama.py"
REASON_LENGTH = 240  # characters of an error that are shown; the log has all


class NotMeasured(Exception):
    """Why a rung has no measurement."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank at the peak. `predicted`: by the planner, for the attention backend that was rehearsed."""

    bytes: int
    predicted: int
    phase: str
    layers: int
    device: str
    attention: str
    report: str
    command: list[str]


@dataclass(frozen=True)
class LadderRehearsals:
    """`flags`: the user's for pretrain_llama.py. `device`: cuda, cpu or None. `layers`: at most the model's are rehearsed."""

    flags: list[str]
    context_parallel_size: int
    seq_length: int
    device: str | None
    layers: int
    folder: Path
    resume: bool = False

    def measure(self, rung: Rung, seconds: float) -> Measured:
        """Raises NotMeasured, also when the rehearsal is not done in `seconds`; it is then ended."""
        if rung.job is None:
            raise NotMeasured("megacp has no such code")
        if rung.job.states_on_host and self.device == "cpu":
            raise NotMeasured("on a CPU the host's memory is the device's")
        self.folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", rung.name).strip("-").lower()
        report, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        short = replace(rung.job, config=replace(rung.job.config, num_layers=min(self.layers, rung.job.config.num_layers)))
        command = self.command(short, rung.plan, report)
        unusable = self._unusable(report, short, rung.plan) if self.resume else f"{self.folder} is not looked at without --resume"
        if unusable is not None:
            if self.device is None:
                raise NotMeasured(unusable)
            report.unlink(missing_ok=True)
            _run(command, log, seconds)
        return of_all_layers(rung, str(report), command)

    def command(self, job: Job, plan: LayerPlan, report: Path) -> list[str]:
        """What rehearses one step of `job` with every layer on `plan`."""
        memory, granularity = _flags_of(plan)
        taken = {
            "--num-layers": job.config.num_layers, "--seq-length": self.seq_length, "--device": self.device or "auto",
            "--context-parallel-size": self.context_parallel_size, "--rehearse-world-size": job.sharding_ranks,
            "--rehearse-attention": "stub", "--rehearse-json": report, "--train-iters": 1, "--attention-mask": "causal",
            "--activation-memory": memory, "--recompute-granularity": granularity, "--mlp-tile-size": job.tile_size,
            "--loss-tile-size": job.loss_tile_size, "--cp-comm-type": "upipe", "--upipe-prefetch": int(plan.prefetch),
            "--upipe-heads-per-stage": job.schedule.heads_per_stage, "--upipe-query-chunk": job.query_chunk,
        }  # fmt: skip
        rest, switches = self._without_switches(), ["--bf16" if job.dtype == torch.bfloat16 else "--fp32"]
        switches += ["--optimizer-cpu-offload"] if job.states_on_host else []
        switches += [] if any(flag.partition("=")[0] in ("--data-path", "--train-data-path") for flag in rest) else ["--mock-data"]
        values = [str(word) for flag, value in taken.items() if value is not None for word in (flag, value)]
        return [sys.executable, str(PROGRAM), *rest, *switches, *values]

    def _without_switches(self) -> list[str]:
        """The user's flags but those that a rung must be able to leave out; of all others the last one counts."""
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        for switch in ("--bf16", "--fp32", "--mock-data", "--optimizer-cpu-offload"):
            parser.add_argument(switch, action="store_true")
        parser.add_argument("--upipe-query-chunk")
        return parser.parse_known_args(self.flags)[1]

    def _unusable(self, report: Path, job: Job, plan: LayerPlan) -> str | None:
        """Why a report is not one of `job`; None: it is."""
        if not report.exists():
            return f"{self.folder} has no report of it"
        try:
            found = read_rehearsal(str(report))
        except ArgumentError as error:  # such as half a file of a run that was ended
            return str(error)
        if self.device is None:
            job = replace(job, config=replace(job.config, num_layers=found.job.config.num_layers))
        elif self.device != _kind(found.device):
            return f"{self.folder} has a report of another device, {found.device}"
        there = replace(found.job, kernel=job.kernel)
        others = [field.name for field in fields(Job) if getattr(there, field.name) != getattr(job, field.name)]
        others += [] if found.plans == [plan] * job.config.num_layers else ["plans"]
        if not others:
            return None
        return f"{self.folder} has a report of another job, {_job_text(found.job)} (other {', '.join(others).replace('_', ' ')})"


def reports_device(folder: Path) -> str | None:
    """cuda or cpu, where the reports of a folder are from; None without any that can be read."""
    for report in sorted(folder.glob("*.json")):
        try:
            return _kind(read_rehearsal(str(report)).device)
        except ArgumentError:
            continue
    return None


def _job_text(job: Job) -> str:
    tokens = job.tokens * job.schedule.ulysses_degree // job.sequences
    return f"{job.config.name}, {tokens:,} tokens on {job.sharding_ranks} GPUs in {str(job.dtype).removeprefix('torch.')}"


def _kind(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"


def of_all_layers(rung: Rung, report: str, command: list[str]) -> Measured:
    """The peak of the rung's whole model, from the report of a rehearsal of some of its layers."""
    rehearsal, phases = read_rehearsal(report), read_json(report, "--rehearse-json of pretrain_llama.py")["phases"]
    job, plans = replace(rung.job, kernel=rehearsal.job.kernel), [rung.plan] * rung.job.config.num_layers
    whole, short = predict_phases(job, plans), predict_phases(rehearsal.job, rehearsal.plans)
    peaks = {}
    for phase, memory in phases.items():
        peaks[phase] = memory["peak"] + bytes_in(phase, whole) - bytes_in(phase, short)
    highest = max(peaks, key=peaks.get)
    return Measured(
        peaks[highest], predict(job, plans).device_bytes, highest, rehearsal.job.config.num_layers, rehearsal.device,
        rehearsal.attention, report, command,
    )  # fmt: skip


def bytes_in(phase: str, predicted: dict[str, Prediction]) -> int:
    """Predicted bytes of a rehearsal's phase. "between" has both moments; beyond it states and gradients alone grow with the layers."""
    if phase in predicted:
        return predicted[phase].device_bytes
    moments = ("head backward", "embedding backward") if phase == "between" else ("embedding backward",)
    return max(predicted[moment].device_bytes for moment in moments if moment in predicted)


def _flags_of(plan: LayerPlan) -> tuple[str, str]:
    """--activation-memory and --recompute-granularity that name the plan."""
    names = ((memory, granularity) for memory in PLANS for granularity in ("selective", "full"))
    return next(name for name in names if plan_of(*name, plan.prefetch) == plan)


def _run(command: list[str], log: Path, seconds: float) -> None:
    """Ends the process, and what it started, when time is over or this one is interrupted."""
    process = None
    with log.open("w", encoding="utf-8") as output:
        try:
            with _interrupts_held():
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"not done after {seconds:.3g} s") from None
        finally:
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise NotMeasured(_reason(log.read_text(encoding="utf-8", errors="replace"), code))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process started in the block is known before an interruption: that is acted on afterwards."""
    held = []
    handlers = {number: signal.signal(number, lambda number, _: held.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in held:
        signal.raise_signal(number)


def _reason(log: str, code: int) -> str:
    """The error of a log, in a line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()] or lines[-1:]
    said = errors[-1].removeprefix("error: ") if errors else "no output"
    how = f"killed by signal {-code}: " if code < 0 else ""
    return how + (said if len(said) <= REASON_LENGTH else f"{said[:REASON_LENGTH]}…")
