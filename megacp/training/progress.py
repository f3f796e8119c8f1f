"""How far a step is: its parts in order, what each should cost, and the share that is done.

    parts = step_parts(config, pairs=[2_098_176] * 2, tokens=2048, recompute=False)    # two micro-batches
    parts[0], parts[config.num_layers]              # Part(1, "forward", 0, …), Part(1, "head", None, …)
    state = position(parts, done=40, costs={"forward": 1.0, …}, seconds=310.0)
    state.phase, state.layer, state.fraction        # "backward", 26, 0.43

A step is forward of every layer, head, backward of every layer in reverse, for each micro-batch, and then the optimizer. A part's
work is its FLOPs; `costs` turns work into time by phase, from what the last step took, so that documents of other lengths and
kernels of other speeds both count. Before a step has been measured all phases are taken to run at the same FLOP/s.

Recompute counts here: the backward makes projections and MLP again (3 times the forward's GEMMs) and q·k inside the attention
kernel (2.5 times its FLOPs), and the attention's forward too when asked to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megacp.model.config import ModelConfig
from megacp.training.metrics import duration_text

PHASES = ("forward", "head", "backward", "optimizer")
# Time of a phase per unit of work, in any unit, when nothing is known: FLOPs cost alike, the optimizer little.
UNKNOWN_COSTS = {"forward": 1.0, "head": 1.0, "backward": 1.0, "optimizer": 0.0}


@dataclass(frozen=True)
class Part:
    """One layer's forward or backward, the head, or the optimizer. Micro-batches count from 1, layers from 0."""

    micro_batch: int
    phase: str
    layer: int | None
    work: float  # FLOPs; 1 for the optimizer


def step_parts(config: ModelConfig, pairs: Sequence[int], tokens: int, recompute: bool) -> list[Part]:
    """The parts of a step in order. `pairs`: attention pairs of each micro-batch's stream; `tokens`: of such a stream.

    `recompute`: the backward runs the attention forward again.
    """
    layers = range(config.num_layers)
    gemms = 2 * config.layer_matmul_parameters() * tokens
    head = 6 * config.vocab_size * config.hidden_size * tokens  # its gradients are made there too
    parts = []
    for number, count in enumerate(pairs, 1):
        attention = 4 * config.num_attention_heads * config.kv_channels * count
        backward = 3 * gemms + (3.5 if recompute else 2.5) * attention
        parts += [Part(number, "forward", layer, gemms + attention) for layer in layers]
        parts.append(Part(number, "head", None, head))
        parts += [Part(number, "backward", layer, backward) for layer in reversed(layers)]
    parts.append(Part(len(pairs), "optimizer", None, 1))
    return parts


def measured_costs(parts: list[Part], seconds: Sequence[float | None], before: dict[str, float]) -> dict[str, float]:
    """Seconds per unit of work by phase, from those of each part; None: not known. What was `before` stays when a whole phase of
    the model is not known, as phases of different units would not compare; and for an optimizer that is not known.
    """
    costs = dict(before)
    for phase in PHASES:
        known = [(part.work, s) for part, s in zip(parts, seconds) if part.phase == phase and s is not None]
        if known:
            costs[phase] = sum(s for _, s in known) / sum(work for work, _ in known)
        elif phase != "optimizer":
            return before
    return costs


@dataclass(frozen=True)
class Position:
    """Where a step is. `layer`: None in head and optimizer. `eta_s`: seconds to the step's end, None before any part is done."""

    micro_batch: int
    phase: str
    layer: int | None
    fraction: float  # of the step's time, as expected
    elapsed_s: float
    eta_s: float | None


def position(parts: list[Part], done: int, costs: dict[str, float], elapsed_s: float, since_last_s: float = 0.0) -> Position:
    """The position after `done` parts, `elapsed_s` into the step, `since_last_s` after the last of them ended.

    Between two ends the fraction stays and the ETA counts down.
    """
    expected = [part.work * costs[part.phase] for part in parts]
    total = sum(expected)
    fraction = min(1.0, sum(expected[:done]) / total) if total else 0.0
    eta = None
    if fraction > 0:
        eta = max(0.0, (elapsed_s - since_last_s) / fraction - elapsed_s)
    now = parts[min(done, len(parts) - 1)]
    return Position(now.micro_batch, now.phase, now.layer, fraction, elapsed_s, eta)


def progress_line(step: int, train_iters: int, where: Position, num_layers: int, micro_batches: int, tokens: int) -> str:
    """For a person. `tokens`: of the whole step; those done are told in proportion.

    >>> progress_line(12, 500, Position(2, "backward", 16, 0.432, 750.0, 987.4), 32, 4, 4194304)
    'step  12/500 | backward  layer 17/32 | micro-batch 2/4 |  43.2% | 1,811,939 of 4,194,304 tokens |  0:12:30 in, ETA  0:16:27'
    """
    layer = "" if where.layer is None else f"layer {where.layer + 1:>{len(str(num_layers))}}/{num_layers}"
    parts = [
        f"step {step:>{len(str(train_iters))}}/{train_iters}",
        f"{where.phase:9} {layer:{7 + 2 * len(str(num_layers))}}",
        f"micro-batch {where.micro_batch:>{len(str(micro_batches))}}/{micro_batches}" if micro_batches > 1 else None,
        f"{100 * where.fraction:5.1f}%",
        f"{int(where.fraction * tokens):,} of {tokens:,} tokens",
        f"{duration_text(where.elapsed_s)} in" + ("" if where.eta_s is None else f", ETA {duration_text(where.eta_s)}"),
    ]
    return " | ".join(part for part in parts if part is not None)
