"""Draw what each layer of memory saving takes away: a bar a rung, in named parts, for any model, length and number of GPUs.

    python tools/memory_ladder.py --model llama3-8b --seq-length 1048576 --gpus 8 --gpu-memory-gib 80 --out ladder

    GiB of one rank          how                        predicted  measured     off    host  states  …
    baseline                 formula                       6605.2                       0.0    89.7
    …
    + query chunks           measured, 4 of 32 layers        20.8      20.9   +0.4%    65.5    11.2
    wrote ladder/memory_ladder.png, ladder/memory_ladder.json

All figures are GiB of one rank at its peak. Where there is a GPU (--measure auto), each rung that megacp can run is rehearsed on
it, without the attention's arithmetic: one step of --measure-layers layers, of all where the model has no more. What the other
layers add is counted: states, gradients and kept activations. A rung that runs out of memory or time keeps its prediction, and the
table says why. The leanest rung is measured first, and a run that is ended draws what it has; --resume goes on in the same folder,
and with --measure none takes what is there (predictions alone do not replace measured figures). --measure cpu counts
the allocations of small models, --measure none only predicts.

Predictions: `counted` runs megacp's own code on PyTorch's meta device, as tools/plan_memory.py does; `formula` is for the first
three rungs, which megacp has no code for (megacp/planning/ladder.py has it). The parts of a bar are predicted, a line marks what
was measured. From recompute on, which keeps each layer's h and makes the rest again with all heads at once and neither MLP nor head
in tiles, flags of pretrain_llama.py that change memory count here as there: --mlp-tile-size from the tiling rung on,
--upipe-heads-per-stage from UPipe's on, --upipe-query-chunk on its own rung (unless given, an eighth of a rank's tokens),
--optimizer-cpu-offload on one more. The picture needs matplotlib.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT, POSITIVE
from megacp.checkpointing.huggingface_config import PretrainedError
from megacp.memory.units import GIB
from megacp.planning.ladder import PARTS, Rung, ladder
from megacp.training.capacity import job_of, parse_planned
from megacp.training.ladder_rehearsals import LadderRehearsals, Measured, NotMeasured, reports_device

USAGE = "memory_ladder.py --gpus N --seq-length TOKENS [--out DIR] [--measure {auto,cpu,none}] [flags of pretrain_llama.py]"
COLORS = dict(zip(PARTS, (
    "#4c72b0", "#8fb0dd", "#937860", "#c9b8a8", "#c44e52", "#dd8452", "#ecb88a", "#55a868", "#ccb974", "#8172b3",
), strict=True))  # fmt: skip
HATCH = {"hatch": "//", "edgecolor": "white", "linewidth": 0}  # of what was not measured
INTERRUPTED = 130  # exit code


@dataclass(frozen=True)
class Bar:
    """A rung and its measurement, or why there is none (nothing was asked for: neither)."""

    rung: Rung
    measured: Measured | None = None
    reason: str | None = None

    @property
    def how(self) -> str:
        if self.measured is None:
            return self.rung.how
        layers = self.rung.job.config.num_layers
        return "measured" if self.measured.layers == layers else f"measured, {self.measured.layers} of {layers} layers"

    @property
    def predicted(self) -> int:
        return self.measured.predicted if self.measured else self.rung.total

    @property
    def total(self) -> int:
        return self.measured.bytes if self.measured else self.rung.total

    @property
    def difference(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured.bytes - 1 if self.measured else None


def measure(bars: list[Bar], rehearsals: LadderRehearsals, rung_s: float, budget_s: float | None) -> None:
    """Measures in place, from the last rung up."""
    start = time.monotonic()
    for index in reversed(range(len(bars))):
        rung = bars[index].rung
        left = rung_s if budget_s is None else min(rung_s, budget_s - (time.monotonic() - start))
        began = time.monotonic()
        try:
            if left <= 0 and rung.job is not None:
                raise NotMeasured(f"--time-budget-s {budget_s:g} was over")
            bars[index] = Bar(rung, rehearsals.measure(rung, left))
        except NotMeasured as reason:
            bars[index] = Bar(rung, reason=str(reason))
        if rung.job is not None:
            bar = bars[index]
            outcome = f"not measured: {bar.reason}" if bar.reason else f"{_gib(bar.total)} GiB, predicted {_gib(bar.predicted)}"
            print(f"{rung.name:25}{time.monotonic() - began:6.1f} s   {outcome}", flush=True)


def text_table(bars: list[Bar]) -> list[str]:
    """Aligned lines, GiB; then what `how` means and what was not measured."""
    shown = [part for part in COLORS if any(bar.rung.parts.get(part) for bar in bars)]
    width = max(len(bar.how) for bar in bars) + 2
    digits = 1 if min(bar.total for bar in bars) >= GIB else 4  # of small models
    heads = "".join(f"{part:>{len(part) + 2}}" for part in shown)
    lines = [f"{'GiB of one rank':25}{'how':{width}}{'predicted':>10}{'measured':>10}{'off':>8}{'host':>8}{heads}"]
    for bar in bars:
        measured = f"{bar.total / GIB:10.{digits}f}{bar.difference:+8.1%}" if bar.measured else " " * 18
        cells = "".join(f"{bar.rung.parts.get(part, 0) / GIB:{len(part) + 2}.{digits}f}" for part in shown)
        predicted, host = f"{bar.predicted / GIB:10.{digits}f}", f"{bar.rung.host_bytes / GIB:8.{digits}f}"
        lines.append(f"{bar.rung.name:25}{bar.how:{width}}{predicted}{measured}{host}{cells}")
    return lines + notes(bars)


def notes(bars: list[Bar]) -> list[str]:
    lines = []
    if any(bar.measured for bar in bars):
        found = next(bar for bar in bars if bar.measured)
        layers, of = found.measured.layers, found.rung.job.config.num_layers
        rest = "" if layers == of else "; states, gradients and kept activations of the others counted"
        on = f"{found.measured.device}, attention {found.measured.attention}"
        lines.append(f"measured: {layers} of {of} layers rehearsed on {on}{rest}; off: how far the prediction is")
    lines.append("predicted: counted from megacp's own code; formula where megacp has none; the parts are predicted ones")
    reasons = {}
    for bar in bars:
        if bar.reason:
            reasons.setdefault(bar.reason, []).append(bar.rung.name)
    return lines + [f"not measured: {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def draw(bars: list[Bar], title: str, budget_gib: float, output: Path) -> None:
    """Left: all totals on a logarithmic axis. Right: the parts on a linear one that ends a little above the budget."""
    import matplotlib

    matplotlib.use("Agg")  # a picture, no window
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    matplotlib.rcParams["hatch.linewidth"] = 0.7
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 6.5), dpi=110, sharey=True, gridspec_kw={"width_ratios": [1, 2.2]}, layout="constrained"
    )
    rows, end = range(len(bars)), 1.5 * budget_gib
    totals = [bar.total / GIB for bar in bars]
    for row, bar in zip(rows, bars):
        left.barh(row, totals[row], color="#777777", height=0.6, **({} if bar.measured else HATCH))
        left.text(totals[row] * 1.1, row, _gib(bar.total), va="center", fontsize=9)
    left.set_xscale("log")
    left.set_xlim(min(totals) / 4, max(totals) * 8)
    left.set_yticks(rows, [f"{bar.rung.name}\n({_says(bar)})" for bar in bars], fontsize=9)
    left.set_xlabel("GiB of one GPU, all (logarithmic)")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    for row, bar in zip(rows, bars):
        start = 0
        for part, color in COLORS.items():
            width = bar.rung.parts.get(part, 0) / GIB
            right.barh(row, width, left=start, color=color, height=0.6, **({} if bar.measured else HATCH))
            start += width
        if bar.measured:
            right.plot([totals[row]] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2.5, solid_capstyle="butt")
        off = f" (predicted {_gib(bar.predicted)})" if bar.measured else ""
        on_host = f"  + {_gib(bar.rung.host_bytes)} on the host" if bar.rung.host_bytes else ""
        if max(totals[row], start) > 0.8 * end:
            arrow = " →" if totals[row] > end else ""
            right.text(0.99 * end, row, f"{_gib(bar.total)}{arrow}{off}{on_host}", va="center", ha="right", fontsize=9, bbox=box)
        else:
            label = f"{_gib(bar.total)}{off}{on_host}"
            right.text(max(totals[row], start) + end / 100, row, label, va="center", fontsize=9, bbox=box)
    right.axvline(budget_gib, color="black", linestyle="--", linewidth=1)
    right.text(budget_gib, -0.75, f"{budget_gib:g} GiB", ha="center", va="bottom", fontsize=9)
    right.set_xlim(0, end)
    mark = "; black line: measured" if any(bar.measured for bar in bars) else ""
    right.set_xlabel(f"GiB of one GPU, in parts as predicted{mark}")
    keys = [Patch(color=color, label=part) for part, color in COLORS.items() if any(bar.rung.parts.get(part) for bar in bars)]
    keys += [Patch(facecolor="#777777", label="predicted", **HATCH)]
    keys += [Patch(facecolor="#777777", label="measured")] if mark else []
    right.legend(handles=keys, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.02), fontsize=9)
    right.set_ylim(len(bars) - 0.4, -0.8)  # the first rung on top
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(output)
    plt.close(figure)


def _gib(bytes_: int) -> str:
    """Three digits, or all before the point."""
    gib = bytes_ / GIB
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 10 else f"{gib:.3g}"


def _says(bar: Bar) -> str:
    return bar.how if bar.measured else f"predicted: {bar.how}"


def record(bars: list[Bar]) -> list[dict]:
    """The bars for programs; bytes of one rank."""
    return [
        {
            "name": bar.rung.name,
            "measured": bar.measured is not None,
            "predicted_by": bar.rung.how,
            "predicted_bytes": bar.predicted,
            "predicted_parts_bytes": bar.rung.parts,
            "host_bytes": bar.rung.host_bytes,
            "measured_bytes": bar.measured and bar.measured.bytes,
            "prediction_off": bar.difference,
            "not_measured_because": bar.reason,
            "rehearsal": bar.measured and asdict(bar.measured),
        }
        for bar in bars
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpus", type=COUNT, required=True, metavar="N", help="GPUs of the job")
    add("--out", type=Path, default=Path("ladder"), metavar="DIR",
        help="for the picture, the JSON and what was rehearsed (default: ladder)")  # fmt: skip
    add("--measure", choices=("auto", "cpu", "none"), default="auto", help="auto: on the GPU where there is one")
    add("--measure-layers", type=COUNT, default=4, metavar="K",
        help="layers to rehearse, 2 at least or all of the model (default: 4)")  # fmt: skip
    add("--rung-time-s", type=POSITIVE, default=120.0, metavar="S", help="most that one rehearsal may take (default: 120)")
    add("--time-budget-s", type=POSITIVE, metavar="S",
        help="most that all may take; the rungs left are predicted (default: no limit)")  # fmt: skip
    add("--resume", action="store_true", help="take what is in --out of the same job; otherwise it is measured again")
    asked, flags = parser.parse_known_args(argv)
    args = parse_planned(flags, USAGE)
    try:
        if args.seq_length is None:
            raise ArgumentError("--seq-length is missing; --seq-length 1048576 works")
        device = _device(asked.measure)
        kept = reports_device(asked.out / "rehearsals") if asked.resume and args.device == "auto" else None
        args.device = device or kept or args.device  # a CPU's rehearsal is in fp32, unless told
        filled, job = job_of(args, asked.gpus, args.seq_length)
        if asked.measure_layers == 1 < job.config.num_layers:
            raise ArgumentError("--measure-layers 1 has no layer between two others; 2 works")
        start = time.monotonic()
        bars = [Bar(rung) for rung in ladder(job)]
        asked.out.mkdir(parents=True, exist_ok=True)
        measures = device or asked.resume
        about = {"model": job.config.name, "seq_length": args.seq_length, "gpus": asked.gpus,
                 "context_parallel_size": filled.context_parallel_size, "gpu_memory_gib": args.gpu_memory_gib}  # fmt: skip
        picture, table = asked.out / "memory_ladder.png", asked.out / "memory_ladder.json"
        title = (
            f"{job.config.name}, {args.seq_length:,} tokens on {asked.gpus} GPUs (context {filled.context_parallel_size}): "
            f"{'peak' if measures else 'predicted peak'} of one rank"
        )

        interrupted = False
        if measures:
            doing = f"rehearsing on the {device}" if device else f"taking what {asked.out} has"
            print(f"predicted in {time.monotonic() - start:.1f} s; {doing}", flush=True)
            context = filled.context_parallel_size, args.seq_length
            rehearsals = LadderRehearsals(flags, *context, device, asked.measure_layers, asked.out / "rehearsals", asked.resume)
            try:
                measure(bars, rehearsals, asked.rung_time_s, asked.time_budget_s)
            except KeyboardInterrupt:
                interrupted = True
        former = None if device else measured_job(table)
        if former and not any(bar.measured for bar in bars):
            why = next((bar.reason for bar in reversed(bars) if bar.reason), "only predictions were asked for")
            raise ArgumentError(
                f"{table} has measured figures of {former}, and this run has none to replace them with: {why}; another --out "
                "works, or --resume with the flags that these were measured with"
            )
        table.write_text(json.dumps(about | {"rungs": record(bars)}, indent=2) + "\n", encoding="utf-8")
    except (ArgumentError, PretrainedError, OSError) as error:
        print(f"memory_ladder: {error}", file=sys.stderr)
        return 1
    print("\n".join(text_table(bars)))
    try:
        draw(bars, title, args.gpu_memory_gib, picture)
        print(f"wrote {picture}, {table}")
    except ImportError as error:
        print(f"wrote {table}, no picture ({error}); with matplotlib, --measure none --resume --out {asked.out} draws it")
    if interrupted:
        print("memory_ladder: interrupted; the rungs measured so far are there, --resume measures the others", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def measured_job(table: Path) -> str | None:
    """The job that a former run measured rungs of; None: there is none in the file."""
    try:
        former = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {"rungs": []}
        measured = any(rung["measured"] for rung in former["rungs"])
        return f"{former['model']}, {former['seq_length']:,} tokens on {former['gpus']} GPUs" if measured else None
    except (ValueError, KeyError, TypeError):  # half a file, or not one of this tool
        return None


def _device(measure: str) -> str | None:
    """Where to rehearse; None: nowhere, though --resume may find reports."""
    if measure == "auto":
        return "cuda" if torch.cuda.is_available() else None
    return "cpu" if measure == "cpu" else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a rehearsal ends with this process, and its results stay
    sys.exit(main())
