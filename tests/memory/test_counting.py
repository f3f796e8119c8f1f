"""Counted bytes against bytes counted by hand."""

import gc
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

from megacp.memory.counting import AllocationCounter
from tests.distributed import run_distributed

KIB = 1024


def floats(kib):
    return torch.empty(kib * KIB // 4)


def test_live_and_peak_follow_allocations():
    with AllocationCounter() as counter:
        a, b = floats(8), floats(4)
        assert (counter.live_bytes(), counter.peak_bytes()) == (12 * KIB, 12 * KIB)
        del b
        assert (counter.live_bytes(), counter.peak_bytes()) == (8 * KIB, 12 * KIB)
        counter.reset_peak()
        c = floats(1)
        assert counter.peak_bytes() == 9 * KIB
        del a, c
        assert (counter.live_bytes(), counter.peak_bytes()) == (0, 9 * KIB)


def test_a_view_costs_nothing_and_keeps_its_storage_alive():
    with AllocationCounter() as counter:
        view = floats(8).view(2, -1)[0, :16]
        assert counter.live_bytes() == 8 * KIB
        alias = view.detach().t()
        del view
        assert counter.live_bytes() == 8 * KIB
        del alias
        assert counter.live_bytes() == 0


def test_a_storage_known_to_python_only_through_c_stays_counted():
    with AllocationCounter() as counter:
        node = (floats(8).requires_grad_() * 2).exp()  # the result is saved by the graph, the product is freed
        graph = node.sum()
        del node
        assert 16 * KIB <= counter.live_bytes() <= 16 * KIB + 16  # the leaf, exp's saved result, the sum
        del graph
        assert counter.live_bytes() == 0


def test_what_was_there_before_does_not_count():
    pool = torch.empty(64 * KIB, dtype=torch.uint8)
    with AllocationCounter() as counter:
        block = pool[:4096].view(torch.float32)
        block.add_(1)
        assert counter.peak_bytes() == 0
        double = block * 2
        assert counter.live_bytes() == 4096
        del double, block, pool
        assert counter.live_bytes() == 0


def test_fake_tensors_have_shapes_and_no_memory():
    with AllocationCounter() as counter, FakeTensorMode():
        floats(8) + 1
    assert counter.peak_bytes() == 0


@pytest.mark.parametrize("resize", [lambda x, n: x.untyped_storage().resize_(n), lambda x, n: x.resize_(n // 4)])
def test_a_resized_storage_counts_at_its_present_size(resize):
    with AllocationCounter() as counter:
        x = floats(4)
        resize(x, 16 * KIB)
        assert counter.live_bytes() == 16 * KIB
        x.untyped_storage().resize_(0)
        assert (counter.live_bytes(), counter.peak_bytes()) == (0, 16 * KIB)
        x.untyped_storage().resize_(8 * KIB)
        assert counter.live_bytes() == 8 * KIB
        del x
        assert counter.live_bytes() == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_" and torch.empty(1).untyped_storage().resize_(0).nbytes() == 0


class _Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach() + 0

    @staticmethod
    def backward(ctx, g):
        scratch = g.repeat(7)
        return g + scratch[: len(g)]


def test_the_backward_of_a_custom_function_is_counted():
    with AllocationCounter() as counter:
        x = floats(8).requires_grad_()
        y = _Scratch.apply(x)
        gradient = torch.ones_like(y)
        before = counter.live_bytes()
        assert before == 24 * KIB
        counter.reset_peak()
        y.backward(gradient)
        assert counter.peak_bytes() == before + 7 * 8 * KIB + 8 * KIB
        assert counter.live_bytes() == before + 8 * KIB  # x.grad


def test_holders_at_the_peak_are_named_by_line():
    with AllocationCounter() as counter:
        kept, more = floats(8), floats(2)
        del more
        floats(1)
    sites = counter.peak_holders()
    assert sum(sites.values()) == 10 * KIB and all(site.startswith("test_counting.py:") for site in sites)
    del kept


def _sharded_model(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    counts = {}
    with AllocationCounter() as counter:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))  # 16 KiB each
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        gc.collect()
        counts["sharded"] = counter.live_bytes()
        counter.reset_peak()
        with torch.no_grad():
            model(torch.zeros(1, 64))
        deadline = time.monotonic() + 10
        while counter.live_bytes() >= counts["sharded"] + 4 * KIB and time.monotonic() < deadline:
            gc.collect()  # gloo's threads let go of a gathered weight when they come to it
            time.sleep(0.01)
        counts["after"], counts["peak"] = counter.live_bytes(), counter.peak_bytes()
    return counts


def test_sharded_weights_are_gathered_and_freed():
    for counts in run_distributed(_sharded_model, 2):
        assert counts["sharded"] == 3 * 8 * KIB
        assert counts["after"] - counts["sharded"] < 4 * KIB
        assert 16 * KIB <= counts["peak"] - counts["sharded"] <= 4 * 16 * KIB + 4 * KIB
