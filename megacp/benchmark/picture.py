"""Draws a benchmark's JSON: rates on the left, memory on the right, against length, both axes logarithmic.

    draw([Path("results/layer.json"), Path("other/layer.json")], Path("layer.png"))

A line is what differs only in length. Rows without figures are left out; a file without any makes no picture. Needs matplotlib.
"""

import json
from collections import defaultdict
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.benchmark.flags import short_tokens

LENGTHS = ("seq_length", "tokens")
# What names a line, where rows differ in it.
LABELS = (
    "model", "ranks", "method", "plan", "prefetch", "query_chunk", "mlp_tile_size", "loss_tile_size", "backend", "heads",
    "documents", "lengths",
)  # fmt: skip
RATES = {
    "layer": ("tokens_per_s_per_gpu", "tokens/s/GPU, scaled to the model's layers"),
    "rank": ("tokens_per_s_per_gpu", "tokens/s/GPU"),
    "head": ("tokens_per_s", "tokens/s"), "attention": ("forward_tflops", "TFLOP/s (dashed: backward)"),
}  # fmt: skip
SECOND_RATE = {"attention": "backward_tflops"}
MARKERS = "os^Dvp*XP<>h"


def draw(files: list[Path], output: Path) -> None:
    """Raises ArgumentError for files of different modes, and for ones that cannot be read or hold no figures."""
    import matplotlib

    matplotlib.use("Agg")  # a picture, no window
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    contents = [_read(file) for file in files]
    modes = sorted({content["mode"] for content in contents})
    if len(modes) > 1:
        raise ArgumentError(f"plot takes files of one mode at a time, not of {' and '.join(modes)}; {files[0]} alone works")
    mode, rate_title = modes[0], RATES[modes[0]][1]
    lines = lines_of(contents, files)
    if not lines:
        raise ArgumentError(f"{files[0]} has no row with figures, so there is nothing to draw; a run that measured one works")
    figure, (rates, memory) = plt.subplots(1, 2, figsize=(14, 6), dpi=130, layout="constrained")
    lengths = sorted({length for points in lines.values() for length, _ in points})
    for number, (label, points) in enumerate(lines.items()):
        x = [length for length, _ in points]
        style = {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "markersize": 6, "alpha": 0.85}
        rates.plot(x, [row[RATES[mode][0]] for _, row in points], label=label, **style)
        if mode in SECOND_RATE:
            rates.plot(x, [row[SECOND_RATE[mode]] for _, row in points], linestyle="--", **style)
        memory.plot(x, [row["peak_gib"] for _, row in points], label=label, **style)
    for axes, title in ((rates, rate_title), (memory, "GPU memory at the most, GiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [short_tokens(length) for length in lengths], minor=False)
        axes.set_xlabel("tokens")
        axes.set_title(title, fontsize=11)
        axes.grid(True, which="both", alpha=0.25)
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:,.4g}"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    sources = {f"{c['environment']['device']}, commit {c['environment']['commit']}" for c in contents}
    figure.suptitle(f"{mode}: {'; '.join(sorted(sources))}", fontsize=12)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def lines_of(contents: list[dict], files: list[Path]) -> dict[str, list[tuple[int, dict]]]:
    """`{label: [(length, row), …]}`, by length. A label says what the lines differ in."""
    rows = [(file, row) for file, content in zip(files, contents) for row in content["rows"] if "problem" not in row]
    varied = [key for key in LABELS if len({row.get(key) for _, row in rows}) > 1]
    several = len({file for file, _ in rows}) > 1
    lines = defaultdict(list)
    for file, row in rows:
        names = [_named(key, row.get(key)) for key in varied] + ([str(file.with_suffix(""))] if several else [])
        length = next(row[key] for key in LENGTHS if key in row)
        lines[", ".join(names) or row.get("method") or row.get("backend") or row["model"]].append((length, row))
    return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def _named(key: str, value) -> str:
    if key in ("model", "method", "plan", "backend", "lengths"):
        return str(value)
    return f"{key.replace('_', ' ')} {'all' if value is None else value}"


def _read(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["mode"], content["rows"], content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        works = "results/layer.json of a run with --out works"
        raise ArgumentError(f"plot {file}: not the JSON of a benchmark ({error}); {works}") from None
    return content
