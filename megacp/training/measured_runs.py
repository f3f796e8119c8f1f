"""What a run measured, beside its rehearsal and its prediction: time, speed and memory, and how far the others are off.

    pretrain_llama.py … --log-jsonl run.jsonl                     # on all GPUs
    pretrain_llama.py … --rehearse-json r.json                    # one rank of the same job on one GPU

    against_rehearsal(read_run("run.jsonl"), read_rehearsal("r.json"), speeds_of("H200"))["rows"]["step s"]
    # {"measured": 12.34, "rehearsed": 12.1, "rehearsed_off": -0.019, "predicted": 11.2, "predicted_off": -0.092}

Steps differ by their documents: with packed ones attention may work twice as long in one as in the next. So the steps that both ran
are compared, a rehearsal reading the same data in the same order; their median. Where they have none in common, or not the same
documents in them, the rehearsed attention is scaled to the measured steps' (query, key) pairs, as the predicted one always is.
First steps, which compile and warm up, and profiled ones count only where there are no others.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.memory.units import GIB
from megacp.training.rehearsals import Rehearsal, RehearsedStep, compare
from megacp.training.resilience import ranges_text
from megacp.training.run_logs import LoggedStep, MeasuredRun, check_same_job
from megacp.training.speeds import Speeds, of_documents
from megacp.training.step_time import predict_step_time

FAR_OFF = 0.05  # of what was measured
SAME_PAIRS = 1e-6  # as far as a log's FLOPs tell them
COLUMNS = ("rehearsed", "predicted")


@dataclass(frozen=True)
class ComparedSteps:
    """`measured` and `rehearsed`: numbers of the steps. Medians: seconds, and pairs of a rank's sequences in a measured step."""

    measured: list[int]
    rehearsed: list[int]
    measured_seconds: float
    rehearsed_seconds: float
    pairs: float
    note: str


def compared_steps(run: MeasuredRun, rehearsal: Rehearsal) -> ComparedSteps:
    config, replicas = rehearsal.job.config, rehearsal.job.sharding_ranks // rehearsal.job.schedule.ulysses_degree
    pairs = {step.number: step.attention_pairs(config) / replicas for step in run.steps}  # of a rank's sequences, on average
    measured, remark = undisturbed(run.steps)
    rehearsed, rehearsed_remark = undisturbed(rehearsal.steps)
    alike = {step.number: step for step in rehearsed if _same(step, pairs.get(step.number))}
    if both := [step for step in measured if step.number in alike]:
        measured, rehearsed = both, [alike[step.number] for step in both]
    else:
        rehearsed = rehearsal.steps[-1:]
        rehearsed_remark = undisturbed(rehearsed)[1]
    wanted = statistics.median(pairs[step.number] for step in measured)
    numbers, rehearsed_numbers = ([step.number for step in steps] for steps in (measured, rehearsed))
    if both:
        seconds = statistics.median(step.seconds for step in rehearsed)
        note = f"{_named(numbers)} of both, the same documents{remark or rehearsed_remark}"
    else:
        seconds = rehearsal.step_seconds + rehearsal.part_seconds["attention"] * (wanted / rehearsal.attention_pairs - 1)
        last = _named(rehearsed_numbers) if rehearsed else "the last step"
        note = f"{_named(numbers)} measured{remark}"
        if not rehearsal.not_timed:
            note += f"; {last} rehearsed{rehearsed_remark}, its attention scaled to their documents"
    return ComparedSteps(numbers, rehearsed_numbers, statistics.median(step.seconds for step in measured), seconds, wanted, note)


def undisturbed(steps: Sequence[LoggedStep | RehearsedStep]) -> tuple[list[LoggedStep | RehearsedStep], str]:
    """Those that are as most of a long run are, or else the best there are and what to say of them.

    A profiler warms up in the step before the first profiled one.
    """
    warm = [step for step in steps if not step.cold]
    plain = [step for step in warm if not step.profiled]
    before = {step.number - 1 for step in steps if step.profiled}
    if best := [step for step in plain if step.number not in before] or plain:
        return best, ""
    if warm:
        return warm, " (profiled, which is slower)"
    return list(steps), " (the first, which compiles and warms up)" if steps else ""


def _named(numbers: list[int]) -> str:
    return f"step{'s' * (len(numbers) > 1)} {ranges_text(numbers)}"


def _same(step: RehearsedStep, pairs: float | None) -> bool:
    return pairs is not None and abs(pairs - step.attention_pairs) <= SAME_PAIRS * step.attention_pairs


def against_rehearsal(run: MeasuredRun, rehearsal: Rehearsal, speeds: Speeds | None) -> dict:
    """`speeds` None: no time is predicted. Raises ArgumentError when they are not of the same job."""
    notes = run.notes + check_same_job(run, rehearsal)
    steps = compared_steps(run, rehearsal)
    job, not_timed, compared = rehearsal.job, rehearsal.not_timed, compare(rehearsal)
    predicted = None
    if speeds is not None:
        packed = of_documents(speeds, steps.pairs / rehearsal.whole_pairs)
        predicted = predict_step_time(job, rehearsal.plans, packed, rehearsal.micro_batches).seconds
        notes.append(f"predicted with the speeds of {speeds.gpu}: {speeds.source_text(job.schedule.ulysses_degree)}")
    if not_timed:
        notes.append(f"no time was rehearsed: {not_timed}")
    rehearsed = None if not_timed else steps.rehearsed_seconds
    seconds = {"measured": steps.measured_seconds, "rehearsed": rehearsed, "predicted": predicted}
    of_rank = job.tokens * rehearsal.micro_batches
    rows = {
        "step s": seconds,
        "tokens/s/GPU": {name: value and of_rank / value for name, value in seconds.items()},
        "peak GiB": {"measured": run.peak_gib, "rehearsed": rehearsal.peak / GIB, "predicted": compared["predicted_bytes"] / GIB},
    }
    for row in rows.values():
        for name in COLUMNS:
            known = None not in (row["measured"], row[name])
            row[f"{name}_off"] = row[name] / row["measured"] - 1 if known else None
    return {
        "run": run.path, "rehearsal": rehearsal.path, "job": compared["job"], "measured_steps": steps.measured,
        "rehearsed_steps": steps.rehearsed, "compared": steps.note, "rows": rows, "not_timed": not_timed, "notes": notes,
    }  # fmt: skip


def run_table(compared: list[dict]) -> list[str]:
    """Lines for a person; an exclamation mark where a figure is far off."""
    lines = []
    for one in compared:
        lines += [f"{one['run']} against {one['rehearsal']}: {one['job']}"]
        lines += [f"medians; {one['compared']}"]
        lines += [f"{'':14}{'measured':>12}{'rehearsed':>12}{'off':>9}  {'predicted':>12}{'off':>9}"]
        for name, row in one["rows"].items():
            cells = "".join(f"{_figure(row[column])}{_share(row[f'{column}_off'])}" for column in COLUMNS)
            lines.append(f"{name:14}{_figure(row['measured'])}{cells}".rstrip())
        lines += [f"note: {note}" for note in one["notes"]]
        lines.append("")
    return [*lines, f"off: from what was measured; !: more than {FAR_OFF:.0%}"]


def _figure(value: float | None) -> str:
    return f"{'-':>12}" if value is None else f"{value:12,.3f}"


def _share(off: float | None) -> str:
    return f"{'-':>9}  " if off is None else f"{off:+9.1%}{' !' if abs(off) > FAR_OFF else '  '}"
