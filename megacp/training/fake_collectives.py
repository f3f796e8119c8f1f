"""Collectives of a job that is not there: every output is filled, from what this rank has.

    initialize_distributed(layout, device, timeout, fake_rank=3)      # the fake backend: groups of the true sizes
    with filled_collectives():
        dist.all_to_all_single(received_C, send_C, group=group)        # received_C is send_C

The fake backend of recent torch fills outputs by itself; that of older ones leaves them as they were, so that garbage would be
trained on. Which one this is, is tried out. Filled means: a gather holds copies of this rank's part, a reduce-scatter its own part
as if the others added nothing, an all-to-all a copy of what was sent. The copies run on the current stream.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def _gather(output: Tensor, input_: Tensor, rank: int, size: int) -> None:
    output.view(size, -1).copy_(input_.reshape(1, -1).expand(size, -1))


def _scatter(output: Tensor, input_: Tensor, rank: int, size: int) -> None:
    output.view(-1).copy_(input_.view(size, -1)[rank])


def _exchange(output: Tensor, input_: Tensor, rank: int, size: int) -> None:
    output.copy_(input_)


FILLERS = {"all_gather_into_tensor": _gather, "reduce_scatter_tensor": _scatter, "all_to_all_single": _exchange}


@contextmanager
def filled_collectives() -> Iterator[None]:
    """While the block runs, the collectives of FSDP and of the engine fill their outputs. The group's backend is `fake`."""
    originals = {name: getattr(dist, name) for name in FILLERS if not _fills(name)}
    for name, original in originals.items():
        setattr(dist, name, filling(original, FILLERS[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def filling(original, fill):
    """`original`, a collective whose first two tensors are output and input and that has a keyword `group`, filling its output."""

    def collective(*args, **kwargs):
        work = original(*args, **kwargs)
        output, input_ = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        group = kwargs.get("group")
        fill(output, input_, dist.get_rank(group), dist.get_world_size(group))
        return work

    return collective


def _fills(name: str) -> bool:
    """Whether the backend does it itself, tried on two numbers a rank."""
    size = dist.get_world_size()
    whole, part = torch.ones(2 * size), torch.ones(2)
    inputs = {"all_gather_into_tensor": part, "reduce_scatter_tensor": whole, "all_to_all_single": whole}
    outputs = {"all_gather_into_tensor": whole, "reduce_scatter_tensor": part, "all_to_all_single": whole}
    output = torch.zeros_like(outputs[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the names that older torch has
        getattr(dist, name)(output, inputs[name])
    return bool((output == 1).all())
