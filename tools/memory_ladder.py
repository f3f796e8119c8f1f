"""Draw what each layer of memory saving takes away: a bar a rung, in named parts, for any model, length and number of GPUs.

    python tools/memory_ladder.py --model llama3-8b --seq-length 1048576 --gpus 8 --gpu-memory-gib 80 --output ladder.png

    GiB of one rank          how        states  …     total      host
    baseline                 formula      89.7  …    6605.2       0.0
    …
    + query chunks           counted      11.2  …      20.8      65.5

All figures are GiB of one rank at its peak; none comes from a GPU. `counted`: megacp's own layer and head run on PyTorch's meta
device and their allocations are counted, as `tools/plan_memory.py` does. `formula`: nobody wants to train so, and megacp has no
such code:

- an autograd layer with a fused attention keeps, per token, h, two normalised inputs and the middle residual (4 d), the rotated q
  and the attention's output (2 H·D), k and v (2 K·D), and in the MLP gate, up, silu and their product (4 F):
  20.5 u in Llama3-8B
- its head holds logits and, in fp32, a copy and the gradient: 10 bytes per token and vocabulary entry
- states 12 bytes per parameter (fp32 master weight, two moments), compute weights 2, gradients 4; FSDP divides states and gradients
  by the GPUs and gathers the weights of two layers and of both ends at a time
- the peak is in the head, with all layers' activations kept, or at the end of the backward, with all gradients there
- baseline and FSDP have the whole sequence on each GPU, Ulysses and all after it have S / C tokens

Rungs from recompute on are `counted`: recompute keeps each layer's h and makes the rest again, with all heads at once and neither
MLP nor head in tiles. Flags of pretrain_llama.py that change memory count here as there: --mlp-tile-size from the tiling rung on,
--upipe-heads-per-stage from UPipe's on, --upipe-query-chunk on its own rung (unless given, an eighth of a rank's tokens),
--optimizer-cpu-offload on one more. Needs matplotlib.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a picture, no window

import matplotlib.pyplot as plt

from megacp.argument_checks import ArgumentError
from megacp.arguments import COUNT
from megacp.checkpointing.huggingface_config import PretrainedError
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.memory.units import GIB
from megacp.planner import GRADIENT_BYTES, STATE_BYTES, Job, predict
from megacp.training.capacity import job_of, parse_planned

USAGE = "memory_ladder.py --gpus N --seq-length TOKENS [--output FILE] [flags of pretrain_llama.py]"
CHUNKS = 8  # of a rank's queries on the last rung, unless --upipe-query-chunk says otherwise
LOGIT_BYTES = 2 + 4 + 4  # logits; in fp32 a copy and the gradient
COLORS = {
    "states": "#4c72b0", "gradients": "#8fb0dd", "weights": "#937860", "gradient reduction": "#c9b8a8",
    "kept activations": "#c44e52", "hidden states": "#dd8452", "attention": "#ecb88a", "weight gradients": "#55a868", "tiles": "#ccb974",
    "output head": "#8172b3",
}  # fmt: skip
HIDDEN_STATES = ("hidden state", "residual gradient", "dxn")  # [T, d] of one layer
IN_TILES = ("projection tile", "MLP tile", "output projection tile", "staging of copies", "weight gradient of a tile")


@dataclass(frozen=True)
class Rung:
    """A bar: bytes of one rank by part, and on the host. `how`: counted or formula."""

    name: str
    how: str
    parts: dict[str, int]
    host_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def ladder(job: Job) -> list[Rung]:
    """The rungs for a job as its flags have it; `job.query_chunk` is that of the last one, or last but one where states leave too."""
    states_on_host, job = job.states_on_host, replace(job, states_on_host=False)
    config, ranks = job.config, job.schedule.ulysses_degree
    all_heads = build_head_schedule(config.num_attention_heads, config.num_query_groups, ranks, config.num_attention_heads)
    untiled = replace(job, schedule=all_heads, tile_size=job.tokens, loss_tile_size=job.tokens, query_chunk=None)
    remade = LayerPlan(output=RECOMPUTE, lse=RECOMPUTE)
    away = replace(remade, h=HOST)
    chunk = job.query_chunk or max(1, job.tokens // (CHUNKS * job.tile_size)) * job.tile_size
    in_stages = replace(job, query_chunk=None)
    in_chunks = replace(job, query_chunk=chunk)
    rungs = [
        autograd_rung("baseline", job, ranks * job.tokens, sharded=False),
        autograd_rung("+ FSDP", job, ranks * job.tokens, sharded=True),
        autograd_rung("+ Ulysses", job, job.tokens, sharded=True),
        counted_rung("+ recompute", untiled, remade),
        counted_rung("+ offload", untiled, away),
        counted_rung("+ tiling", replace(in_stages, schedule=all_heads), away),
        counted_rung("+ UPipe", in_stages, away),
        counted_rung("+ saved attention, lean", in_stages, PLANS["lean"]),
        counted_rung("+ query chunks", in_chunks, PLANS["lean"]),
    ]
    if states_on_host:
        rungs.append(counted_rung("+ optimizer on the host", replace(in_chunks, states_on_host=True), PLANS["lean"]))
    return rungs


def counted_rung(name: str, job: Job, plan: LayerPlan) -> Rung:
    """The planner's prediction with every layer on `plan`; its buffers by what they are for."""
    prediction = predict(job, [plan] * job.config.num_layers)
    parts = dict(prediction.parts)
    del parts["buffers"]
    parts["weights"] = parts.pop("gathered weights")
    for buffer, bytes_ in prediction.buffers.items():
        part = "output head" if prediction.moment == "head" else _part_of(buffer)
        parts[part] = parts.get(part, 0) + bytes_
    return Rung(name, "counted", parts, prediction.host_bytes)


def _part_of(buffer: str) -> str:
    """Of a layer's buffer; q, k, v, o, their gradients, messages and workspace are attention's."""
    if buffer in HIDDEN_STATES:
        return "hidden states"
    return "weight gradients" if "weight gradients" in buffer else "tiles" if buffer in IN_TILES else "attention"


def autograd_rung(name: str, job: Job, tokens: int, sharded: bool) -> Rung:
    """The closed form of the module's docstring, for `tokens` on a rank."""
    config, itemsize = job.config, job.dtype.itemsize
    parameters, ranks = config.parameter_count(), job.sharding_ranks if sharded else 1
    ends = config.vocab_size * config.hidden_size * (2 if config.untie_embeddings_and_output_weights else 1)
    heads = config.num_attention_heads + config.num_query_groups
    kept_per_token = 4 * config.hidden_size + 2 * heads * config.kv_channels + 4 * config.ffn_hidden_size
    kept = config.num_layers * tokens * kept_per_token * itemsize
    in_head = {"kept activations": kept, "output head": tokens * config.vocab_size * LOGIT_BYTES}
    at_the_end = {"gradients": GRADIENT_BYTES * parameters // ranks, "kept activations": kept // config.num_layers}
    parts = {
        "states": STATE_BYTES * parameters // ranks,
        "weights": (2 * config.layer_parameters() + ends if sharded else parameters) * itemsize,
        **max(in_head, at_the_end, key=lambda moment: sum(moment.values())),
    }
    return Rung(name, "formula", parts)


def text_table(rungs: list[Rung]) -> list[str]:
    """Aligned lines, GiB."""
    shown = [part for part in COLORS if any(rung.parts.get(part) for rung in rungs)]
    lines = [f"{'GiB of one rank':25}{'how':9}" + "".join(f"{part:>{len(part) + 2}}" for part in (*shown, "   total", "    host"))]
    for rung in rungs:
        cells = [f"{rung.parts.get(part, 0) / GIB:{max(len(part), 1) + 2}.1f}" for part in shown]
        lines.append(f"{rung.name:25}{rung.how:9}{''.join(cells)}{rung.total / GIB:10.1f}{rung.host_bytes / GIB:10.1f}")
    return lines


def draw(rungs: list[Rung], title: str, budget_gib: float, output: str) -> None:
    """Left: all totals on a logarithmic axis. Right: the parts on a linear one that ends a little above the budget."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 6), dpi=130, sharey=True, gridspec_kw={"width_ratios": [1, 2.2]}, layout="constrained"
    )
    rows, end = range(len(rungs)), 1.5 * budget_gib
    totals = [rung.total / GIB for rung in rungs]
    left.barh(rows, totals, color=["#bbbbbb" if rung.how == "formula" else "#666666" for rung in rungs], height=0.6)
    left.set_xscale("log")
    left.set_xlim(min(totals) / 4, max(totals) * 8)
    for row, total in zip(rows, totals):
        left.text(total * 1.1, row, f"{total:,.1f}" if total < 100 else f"{total:,.0f}", va="center", fontsize=9)
    left.set_yticks(rows, [f"{rung.name}\n({rung.how})" for rung in rungs])
    left.set_xlabel("GiB of one GPU, all (logarithmic)")
    for part, color in COLORS.items():
        widths = [rung.parts.get(part, 0) / GIB for rung in rungs]
        if any(widths):
            before = list(COLORS)[: list(COLORS).index(part)]
            starts = [sum(rung.parts.get(other, 0) for other in before) / GIB for rung in rungs]
            right.barh(rows, widths, left=starts, color=color, height=0.6, label=part)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    for row, rung in zip(rows, rungs):
        on_host = f"  + {rung.host_bytes / GIB:,.0f} on the host" if rung.host_bytes else ""
        total = rung.total / GIB
        if total > end:
            right.text(0.99 * end, row, f"{total:,.0f} →{on_host}", va="center", ha="right", fontsize=9, bbox=box)
        else:
            right.text(total + end / 100, row, f"{total:,.1f}{on_host}", va="center", fontsize=9, bbox=box)
    right.axvline(budget_gib, color="black", linestyle="--", linewidth=1)
    right.text(budget_gib, -0.75, f"{budget_gib:g} GiB", ha="center", va="bottom", fontsize=9)
    right.set_xlim(0, end)
    right.set_xlabel("GiB of one GPU, in parts")
    right.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.02), fontsize=9)
    right.set_ylim(len(rungs) - 0.4, -0.8)  # the first rung on top
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=COUNT, required=True, metavar="N", help="GPUs of the job")
    parser.add_argument("--output", default="memory_ladder.png", metavar="FILE",
        help=".png, .svg or .pdf (default: memory_ladder.png)")  # fmt: skip
    asked, flags = parser.parse_known_args(argv)
    args = parse_planned(flags, USAGE)
    try:
        if args.seq_length is None:
            raise ArgumentError("--seq-length is missing; --seq-length 1048576 works")
        filled, job = job_of(args, asked.gpus, args.seq_length)
        rungs = ladder(job)
        print("\n".join(text_table(rungs)))
        layout = f"{asked.gpus} GPUs (context {filled.context_parallel_size})"
        title = f"{job.config.name}, {args.seq_length:,} tokens on {layout}: predicted peak of one rank"
        draw(rungs, title, args.gpu_memory_gib, asked.output)
    except (ArgumentError, PretrainedError, OSError) as error:
        print(f"memory_ladder: {error}", file=sys.stderr)
        return 1
    print(f"wrote {asked.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
