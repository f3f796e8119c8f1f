"""What a layer or the head computes and moves, counted while it runs on the meta device: FLOPs by part, messages, copies.

    with WorkCounter() as counter:
        out_Td = layer(h_Td, context)
        forward = counter.take({id(store.region(0, "h")): "h"})
    forward.gemm_flops             # {"projections": …, "mlp": …, "other": …}: 2·m·n·k of each matrix product
    forward.attention_forward      # {FLOPs of a call: calls}; 4·D for each query, head and key that it sees
    forward.messages               # {bytes that a rank hands to an all-to-all, its own block included: all-to-alls}
    forward.copies                 # {("h", "out"): …, ("h", "in"): …}: bytes between the device and host or disk, by region
    forward.projection_reads       # {"h": …}: of those, what comes in while heads are projected

The parts are those that a rehearsal times (`megacp.training.part_times`), so that work and seconds of a part can be divided.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacp.context_parallel import engine
from megacp.context_parallel.all_to_all import Exchange
from megacp.kernels.attention import Documents
from megacp.memory.host_region import HostRegion
from megacp.model import decoder_layer
from megacp.model.attention_projections import AttentionProjections
from megacp.model.output_head import OutputHead

LAYER_PARTS = {
    "projections": [(AttentionProjections, name) for name in ("turn", "pack_do", "close")],
    "all-to-all": [(engine, "all_to_all"), (Exchange, "wait")],  # what ran beside the computation costs no wait
    "attention": [(engine, "attention_forward"), (engine, "attention_backward")],
    "mlp": [(decoder_layer, "_mlp_forward"), (decoder_layer, "_mlp_backward_")],
    "head": [(OutputHead, "forward")],
}
OTHER = "other"  # the output projection
BACKWARD_FLOPS = 2.5  # of attention, in those of the forward: five matrix products, two in the forward
FACTORS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # operator: position of its first factor


@dataclass(frozen=True)
class Work:
    """Of one rank; see the module."""

    gemm_flops: Counter = field(default_factory=Counter)
    attention_forward: Counter = field(default_factory=Counter)
    attention_backward: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)
    projection_reads: Counter = field(default_factory=Counter)

    @property
    def flops(self) -> float:
        """All that is computed; what is computed again included."""
        forward, backward = (sum(flops * calls for flops, calls in x.items()) for x in (self.attention_forward, self.attention_backward))
        return sum(self.gemm_flops.values()) + forward + BACKWARD_FLOPS * backward


class WorkCounter(TorchDispatchMode):
    """A context manager. While it is on, the functions of `LAYER_PARTS` are replaced by counted ones.

    What is done while `times` is n counts n times. `joint_chunk`, (tokens of a rank, tokens of a query chunk): what so many tokens
    send and attend to at a time counts as that of their chunks.
    """

    times: int = 1
    joint_chunk: tuple[int, int] | None = None

    def __init__(self):
        super().__init__()
        self._work, self._part, self._replaced = Work(), OTHER, []

    def take(self, regions: dict[int, str] | None = None) -> Work:
        """What was done since the last call. `regions` names those that are kept, by id; another is the residual gradient's."""
        done, self._work = self._work, Work()
        names = regions or {}
        copies = {(names.get(region, "residual_grad"), way): bytes_ for (region, way), bytes_ in done.copies.items()}
        reads = {names.get(region, "residual_grad"): bytes_ for region, bytes_ in done.projection_reads.items()}
        return replace(done, copies=Counter(copies), projection_reads=Counter(reads))

    def __enter__(self) -> "WorkCounter":
        for part, targets in LAYER_PARTS.items():
            for owner, name in targets:
                self._replace(owner, name, lambda *args, part=part: self._enter_part(part, *args))
        self._replace(engine, "all_to_all", self._note_message)
        self._replace(engine, "attention_forward", lambda q, k, *args: self._note_attention("attention_forward", q, args[1]))
        self._replace(engine, "attention_backward", lambda do, q, *args: self._note_attention("attention_backward", q, args[4]))
        self._replace(HostRegion, "write", lambda region, key, offset, tensor, _: self._note_copy(region, "out", tensor))
        self._replace(HostRegion, "read", lambda region, key, offset, tensor, _: self._note_copy(region, "in", tensor))
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)

    def _replace(self, owner, name: str, note: Callable) -> None:
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            part = self._part
            note(*args)
            try:
                return original(*args, **kwargs)
            finally:
                self._part = part

        self._replaced.append((owner, name, original))
        setattr(owner, name, noted)

    def _enter_part(self, part: str, *_) -> None:
        self._part = part

    def _note_message(self, send_C: torch.Tensor, group) -> None:
        if group is not None and group.size() > 1:
            chunks = send_C.shape[1] // self._chunk_size(send_C.shape[1])
            self._work.messages[send_C.nbytes // chunks] += chunks

    def _note_attention(self, kind: str, q_SHD: torch.Tensor, documents: Documents) -> None:
        queries, heads, head_dim = q_SHD.shape
        tokens = self._chunk_size(queries)
        for after in range(0, queries, tokens):  # tokens of later chunks, which this one does not see
            seen = documents if not after else Documents((0, documents.total - after))
            getattr(self._work, kind)[4 * head_dim * heads * visible_pairs(seen, tokens)] += 1

    def _chunk_size(self, tokens: int) -> int:
        """Of `tokens` that are there at a time, those that would be in the job."""
        joint, chunk = self.joint_chunk or (None, None)
        return chunk if tokens == joint else tokens

    def _note_copy(self, region: HostRegion, way: str, tensor: torch.Tensor) -> None:
        self._work.copies[id(region), way] += self.times * tensor.nbytes
        if way == "in" and self._part == "projections":
            self._work.projection_reads[id(region)] += self.times * tensor.nbytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.rstrip("_")
        if name in FACTORS:
            left, right = args[FACTORS[name] : FACTORS[name] + 2]
            self._work.gemm_flops[self._part] += self.times * 2 * left.numel() * right.shape[-1]
        return function(*args, **(kwargs or {}))


def visible_pairs(documents: Documents, queries: int) -> int:
    """(query, key) pairs when the last `queries` tokens of the stream look back, each to the beginning of its document.

    >>> visible_pairs(Documents((0, 3, 8)), 8), visible_pairs(Documents((0, 3, 8)), 2)
    (21, 9)
    """
    first = documents.total - queries
    before = (max(first - start, 0) for start, _ in documents.spans())
    lengths = (stop - start for start, stop in documents.spans())
    return sum((n * (n + 1) - hidden * (hidden + 1)) // 2 for n, hidden in zip(lengths, before) if hidden < n)
