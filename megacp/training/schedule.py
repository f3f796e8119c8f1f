"""The learning rate as a function of the step number, and of nothing else.

    lr
    │      ┌───────┐          warm-up: linear from 0 over `warmup_iters`
    │     ╱         ╲         then by style: constant, linear, cosine, or WSD (stay, then decay over the last part)
    │    ╱           ╲______  after `decay_iters`: min_lr (constant stays at lr)
    └───┴─────────────┴────── step

>>> rates = dict(lr=1.0, min_lr=0.1, warmup_iters=10, decay_iters=110)
>>> [round(learning_rate(step, style="cosine", **rates), 4) for step in (1, 10, 60, 110, 500)]
[0.1, 1.0, 0.55, 0.1, 0.1]
>>> [round(learning_rate(step, style="WSD", wsd_decay_iters=20, **rates), 4) for step in (90, 100, 110)]
[1.0, 0.4728, 0.1]

Steps count optimizer updates from 1. With Megatron's formulas (`OptimizerParamScheduler.get_lr`), and its default, exponential
decay for WSD: half-way through the last part the excess over min_lr has fallen to 2 * sqrt(1/2) - 1 = 41%.
"""

import math


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr: float,
    warmup_iters: int,
    decay_iters: int,
    style: str,
    wsd_decay_iters: int | None = None,
) -> float:
    """The learning rate of update `step` (1 is the first). `wsd_decay_iters`: length of WSD's decay, which ends at `decay_iters`.

    Needs warmup_iters < decay_iters unless constant, and for WSD wsd_decay_iters <= decay_iters - warmup_iters.
    """
    if step < warmup_iters:
        return lr * step / warmup_iters
    if style == "constant":
        return lr
    if step >= decay_iters:
        return min_lr
    ratio = (step - warmup_iters) / (decay_iters - warmup_iters)
    if style == "linear":
        share = 1.0 - ratio
    elif style == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * ratio))
    elif style == "WSD":
        share = 2.0 * 0.5 ** max(0.0, 1.0 - (decay_iters - step) / wsd_decay_iters) - 1.0
    else:
        raise ValueError(f"--lr-decay-style {style} is not known; cosine, linear, constant and WSD are")
    return min_lr + share * (lr - min_lr)
