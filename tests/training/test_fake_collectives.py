"""Faked collectives fill what they give back, also on a backend that leaves it as it was."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacp.training.fake_collectives import FILLERS, filled_collectives, filling

RANK, SIZE = 2, 4


@pytest.fixture(autouse=True)
def fake_job():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    yield
    dist.destroy_process_group()


def _leaves_its_output(*args, **kwargs):
    return "work"


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_outputs_hold_what_this_rank_has(moves, monkeypatch):
    if not moves:
        for name in FILLERS:
            monkeypatch.setattr(dist, name, _leaves_its_output)
    with filled_collectives():
        part, whole = torch.tensor([5.0, 6.0]), torch.arange(8.0)
        gathered = torch.full((8,), torch.nan)
        dist.all_gather_into_tensor(gathered, part, group=dist.group.WORLD, async_op=True)
        assert gathered.tolist() == [5, 6] * SIZE
        scattered = torch.full((2,), torch.nan)
        dist.reduce_scatter_tensor(output=scattered, input=whole, group=dist.group.WORLD)
        assert scattered.tolist() == [4, 5]
        received = torch.full((4, 2), torch.nan)
        dist.all_to_all_single(received, whole.view(4, 2), group=dist.group.WORLD)
        assert received.flatten().tolist() == whole.tolist()
    if not moves:
        assert dist.all_to_all_single is _leaves_its_output


def test_the_work_is_handed_on():
    assert filling(_leaves_its_output, FILLERS["all_to_all_single"])(torch.empty(2), torch.ones(2)) == "work"
