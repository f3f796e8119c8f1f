"""What a run measured, beside its rehearsal and its prediction: time, speed and memory, and how far the others are off.

    pretrain_llama.py … --log-jsonl run.jsonl                     # on all GPUs
    pretrain_llama.py … --rehearse-json r.json                    # one rank of the same job on one GPU

    against_rehearsal(read_run("run.jsonl"), read_rehearsal("r.json"), speeds_of("H200"))["rows"]["step s"]
    # {"measured": 12.34, "rehearsed": 12.1, "rehearsed_off": -0.019, "predicted": 11.2, "predicted_off": -0.092}
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.memory.units import GIB
from megacp.training.rehearsals import Rehearsal, compare
from megacp.training.speeds import Speeds
from megacp.training.step_time import predict_step_time

FAR_OFF = 0.05  # of what was measured
COLUMNS = ("rehearsed", "predicted")


@dataclass(frozen=True)
class MeasuredRun:
    """Of a log. Medians of `steps` steps: all but the first of the log, which compiles and warms up, or that one if it is alone."""

    path: str
    steps: int
    tokens: int  # of a step, over all ranks
    step_seconds: float
    tokens_per_s_per_gpu: float
    peak_gib: float | None  # the most of all steps; None on a CPU


def read_run(path: str) -> MeasuredRun:
    """Raises ArgumentError for what --log-jsonl did not write."""
    try:
        records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        counted = records[1:] or records
        peaks = [record["peak_memory_gib"] for record in records]
        return MeasuredRun(
            path, len(counted), records[0]["tokens"], statistics.median(record["step_time_s"] for record in counted),
            statistics.median(record["tokens_per_s_per_gpu"] for record in counted), None if None in peaks else max(peaks),
        )  # fmt: skip
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        problem = f"is no log of steps ({type(error).__name__}: {error})"
    raise ArgumentError(f"--measured {path} {problem}; a file that --log-jsonl of pretrain_llama.py writes works")


def against_rehearsal(run: MeasuredRun, rehearsal: Rehearsal, speeds: Speeds | None) -> dict:
    """`speeds` None: no time is predicted. Raises ArgumentError when they are of steps of other sizes."""
    job = rehearsal.job
    tokens = job.tokens * job.sharding_ranks * rehearsal.micro_batches
    if tokens != run.tokens:
        raise ArgumentError(
            f"--measured {run.path} has steps of {run.tokens:,} tokens, --rehearsal {rehearsal.path} of {tokens:,}; a log and a "
            "rehearsal of the same flags work"
        )
    compared, not_timed = compare(rehearsal), rehearsal.not_timed
    time = predict_step_time(job, rehearsal.plans, speeds, rehearsal.micro_batches) if speeds else None
    of_rank = job.tokens * rehearsal.micro_batches
    seconds = {
        "measured": run.step_seconds,
        "rehearsed": None if not_timed else rehearsal.step_seconds,
        "predicted": None if time is None else time.seconds,
    }
    speed = {name: value and of_rank / value for name, value in seconds.items()}
    rows = {
        "step s": seconds,
        "tokens/s/GPU": speed | {"measured": run.tokens_per_s_per_gpu},
        "peak GiB": {"measured": run.peak_gib, "rehearsed": rehearsal.peak / GIB, "predicted": compared["predicted_bytes"] / GIB},
    }
    for row in rows.values():
        for name in COLUMNS:
            known = None not in (row["measured"], row[name])
            row[f"{name}_off"] = row[name] / row["measured"] - 1 if known else None
    files = {"run": run.path, "rehearsal": rehearsal.path}
    return files | {"job": compared["job"], "steps": run.steps, "rows": rows, "not_timed": not_timed}


def run_table(compared: list[dict]) -> list[str]:
    """Lines for a person; an exclamation mark where a figure is far off."""
    lines = []
    for one in compared:
        lines += [f"{one['run']} against {one['rehearsal']}, median of {one['steps']} step{'s' * (one['steps'] > 1)}: {one['job']}"]
        lines += [f"{'':14}{'measured':>12}{'rehearsed':>12}{'off':>9}  {'predicted':>12}{'off':>9}"]
        for name, row in one["rows"].items():
            cells = "".join(f"{_figure(row[column])}{_share(row[f'{column}_off'])}" for column in COLUMNS)
            lines.append(f"{name:14}{_figure(row['measured'])}{cells}".rstrip())
        if one["not_timed"]:
            lines.append(f"no time was rehearsed: {one['not_timed']}")
        lines.append("")
    return [*lines, f"off: from what was measured; !: more than {FAR_OFF:.0%}"]


def _figure(value: float | None) -> str:
    return f"{'-':>12}" if value is None else f"{value:12,.3f}"


def _share(off: float | None) -> str:
    return f"{'-':>9}  " if off is None else f"{off:+9.1%}{' !' if abs(off) > FAR_OFF else '  '}"
