"""On a GPU too, where activations live changes no bit of loss and gradients, however late a copy is."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megacp.memory import disk_region
from megacp.memory.copies import Copies
from megacp.memory.host_region import HostPool
from megacp.memory.policy import PLANS, plan_of
from tests.gpu.test_layer_gpu import BORDERS, config_of, gradients

CYCLES = 1_000_000  # some 0.6 ms, longer than any stage or tile of this model computes
SETTINGS = [(memory, granularity, ahead) for memory in PLANS for granularity, ahead in (("selective", 0), ("full", 0), ("selective", 1))]
SETTINGS.append(("gpu", "none", 0))


def ours(memory, granularity, prefetch):
    """Loss and gradients of three layers, heads in four stages. The reference backend adds in one order always; fast ones need not."""
    plan = plan_of(memory, granularity, prefetch)
    (loss, _), grads = gradients(config_of(8, 2), torch.bfloat16, 2, BORDERS["documents"], "reference", plan)
    return {"loss": loss.detach()} | {name: gradient for name, (gradient, _) in grads.items()}


@pytest.fixture(scope="module")
def expected():
    return ours("gpu", "selective", 0)


def assert_equal_bits(results, expected):
    assert [name for name, value in results.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("memory, granularity, prefetch", SETTINGS)
def test_every_plan_gives_the_same_bits(memory, granularity, prefetch, expected):
    assert_equal_bits(ours(memory, granularity, prefetch), expected)


@pytest.mark.parametrize("memory, granularity, prefetch", SETTINGS[3:])
def test_late_copies_change_nothing(memory, granularity, prefetch, expected, monkeypatch):
    """Each copy begins after a pause on its stream. Who does not wait for it reads or overwrites what is not there yet."""
    host, disk = Copies._copy, disk_region._copy

    def late_host(copies, stream, *rest):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        return host(copies, stream, *rest)

    def late_disk(stream, *rest):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        return disk(stream, *rest)

    monkeypatch.setattr(Copies, "_copy", late_host)
    monkeypatch.setattr(disk_region, "_copy", late_disk)
    assert_equal_bits(ours(memory, granularity, prefetch), expected)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("memory", ["host", "disk", "lean"])
def test_a_late_computation_changes_nothing(memory, prefetch, expected, monkeypatch):
    """The device lags behind the host: copies must wait for what makes their source and for what still reads their destination."""
    now = Copies.now

    def lagging(copies):
        torch.cuda._sleep(CYCLES)
        return now(copies)

    monkeypatch.setattr(Copies, "now", lagging)
    assert_equal_bits(ours(memory, "selective", prefetch), expected)


def test_host_memory_is_pinned_to_the_byte():
    """PyTorch's own allocator of pinned memory would take a power of two."""
    bytes_ = 5 * 2**20 + 4096
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    memory = HostPool(bytes_, pinned=True).take_memory(bytes_)
    assert memory.nbytes == bytes_ and memory.data_ptr() % 4096 == 0 and memory.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    on_device = torch.arange(bytes_, device="cuda").to(torch.uint8)
    copies = Copies(torch.device("cuda", torch.cuda.current_device()))
    copies.wait(copies.to_host(memory, on_device))
    torch.cuda.synchronize()
    assert torch.equal(memory, on_device.cpu())
