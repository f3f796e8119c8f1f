"""The rungs of the memory ladder: one job with one more layer of memory saving at a time, and what each takes, predicted.

    rungs = ladder(job)                                # job as the flags have it: Llama3-8B, 8 GPUs, 1M tokens
    rungs[0].name, rungs[0].how, rungs[0].total        # "baseline", "formula", 7.1e12 bytes of one rank
    rungs[-1].name, rungs[-1].how, rungs[-1].total     # "+ query chunks", "counted", 22.3e9
    rungs[-1].job, rungs[-1].plan                      # a job that can run: what a rehearsal measures

`counted`: megacp's own layer and head run on PyTorch's meta device and their allocations are counted, as `megacp.planner` does.
`formula`: nobody wants to train so, and megacp has no such code:

- an autograd layer with a fused attention keeps, per token, h, two normalised inputs and the middle residual (4 d), the rotated q
  and the attention's output (2 H·D), k and v (2 K·D), and in the MLP gate, up, silu and their product (4 F):
  20.5 u in Llama3-8B
- its head holds logits and, in fp32, a copy and the gradient: 10 bytes per token and vocabulary entry
- states 12 bytes per parameter (fp32 master weight, two moments), compute weights 2, gradients 4; FSDP divides states and gradients
  by the GPUs and gathers the weights of two layers and of both ends at a time
- the peak is in the head, with all layers' activations kept, or at the end of the backward, with all gradients there
- baseline and FSDP have the whole sequence on each GPU, Ulysses and all after it have S / C tokens
"""

from dataclasses import dataclass, replace

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.planner import GRADIENT_BYTES, STATE_BYTES, Job, predict

CHUNKS = 8  # of a rank's queries on the last rung, unless the job says otherwise
LOGIT_BYTES = 2 + 4 + 4  # logits; in fp32 a copy and the gradient
PARTS = (
    "states", "gradients", "weights", "gradient reduction", "kept activations", "hidden states", "attention", "weight gradients",
    "tiles", "output head",
)  # fmt: skip
HIDDEN_STATES = ("hidden state", "residual gradient", "dxn")  # [T, d] of one layer
EMBEDDING_GRADIENT = ("gradient of the embedding", "sums by token")
IN_TILES = ("projection tile", "MLP tile", "output projection tile", "staging of copies")


@dataclass(frozen=True)
class Rung:
    """A bar: predicted bytes of one rank by part, and on the host. `how`: counted, then with a job that can run, or formula."""

    name: str
    how: str
    parts: dict[str, int]
    host_bytes: int = 0
    job: Job | None = None
    plan: LayerPlan | None = None  # of every layer

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def ladder(job: Job) -> list[Rung]:
    """The rungs for a job as its flags have it. `job.query_chunk` is that of query chunks' own rung on."""
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
    return Rung(name, "counted", parts, prediction.host_bytes, job, plan)


def _part_of(buffer: str) -> str:
    """Of a layer's buffer; q, k, v, o, their gradients, messages and workspace are attention's."""
    if buffer in HIDDEN_STATES:
        return "hidden states"
    if "weight gradients" in buffer or buffer in EMBEDDING_GRADIENT:
        return "weight gradients"
    return "tiles" if buffer in IN_TILES else "attention"


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
