"""Draw the loss of one or several runs from their JSON lines (`--log-jsonl`).

    python tools/plot_loss.py run.jsonl --output loss.png
    python tools/plot_loss.py a.jsonl b.jsonl --labels "1 rank" "C = 4" --smooth 50 --output compare.png

The pale line is every step, the strong one a centred mean over --smooth steps. Reads a run that is still going.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a picture, no window

import matplotlib.pyplot as plt
import numpy as np


def read_losses(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a file, in its order; a step without a loss (null) is left out, as is a last line half written.

    Raises ValueError naming file and line for anything else, and for a file without a loss.
    """
    steps, losses = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                step, loss = record["step"], record["loss"]
            except (ValueError, KeyError, TypeError):
                if not line.endswith("\n"):
                    break
                raise ValueError(f"{path}: line {number} is not a step record, as --log-jsonl writes them") from None
            if loss is not None:
                steps.append(step)
                losses.append(loss)
    if not steps:
        raise ValueError(f"{path}: no step with a loss in it; give the file of --log-jsonl after the first step")
    return np.array(steps), np.array(losses, dtype=np.float64)


def centred_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over `window` neighbours. At the start the window grows evenly on both sides, so that a steep fall is not bent; at
    the end it holds the neighbours that are there.

    >>> centred_mean(np.array([0.0, 3.0, 6.0, 3.0]), 3).tolist()
    [0.0, 3.0, 4.0, 4.5]
    """
    index = np.arange(len(values))
    left = np.minimum(index, window // 2)
    right = np.minimum(np.minimum(index, (window - 1) // 2), index[::-1])
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[index + right + 1] - total[index - left]) / (left + right + 1)


def plot(paths: list[str], labels: list[str], output: str, smooth: int | None) -> None:
    """Write the picture. `smooth` None: a twentieth of the steps."""
    runs = [read_losses(path) for path in paths]
    figure, axes = plt.subplots(figsize=(9, 5), dpi=150)
    for number, (label, (steps, losses)) in enumerate(zip(labels, runs)):
        window = smooth if smooth is not None else max(1, len(steps) // 20)
        mean, color = centred_mean(losses, window), f"C{number % 10}"
        if window == 1:
            marker = "o" if len(steps) <= 60 else None
            name = f"{label}: {losses[-1]:.4f} at step {steps[-1]}"
            axes.plot(steps, losses, color=color, linewidth=1.8, marker=marker, markersize=3, label=name)
        else:
            name = f"{label}: {losses[-window:].mean():.4f}, mean of the last {min(window, len(losses))} of {steps[-1]} steps"
            axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, mean, color=color, linewidth=1.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="FILE", help="JSON lines, one object a step")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="one per file (default: the files' names)")
    parser.add_argument("--smooth", type=int, metavar="STEPS", help="window of the mean; 1: none (default: 1/20 of the steps)")
    parser.add_argument("--output", default="loss.png", metavar="FILE", help=".png, .svg or .pdf (default: loss.png)")
    args = parser.parse_args(argv)
    labels = args.labels or [Path(run).stem for run in args.runs]
    if len(labels) != len(args.runs):
        parser.error(f"--labels: {len(labels)} for {len(args.runs)} files; give {len(args.runs)}")
    if args.smooth is not None and args.smooth < 1:
        parser.error(f"--smooth {args.smooth} is less than one step; 1 (none) or more works")
    try:
        plot(args.runs, labels, args.output, args.smooth)
    except (OSError, ValueError) as error:
        print(f"plot_loss: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
