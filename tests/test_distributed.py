"""The helper that runs ranks must tell a test the truth: results by rank, the failing rank's traceback, no hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailure, run_distributed


def _sum_of_ranks(rank, world_size, factor):
    total = torch.tensor([factor * rank])
    dist.all_reduce(total)
    return rank, world_size, total


def _fail_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError("the cause of it all")
    dist.barrier()


def _die_on_rank_one(rank, world_size):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_one(rank, world_size):
    if rank == 1:
        time.sleep(600)


def test_results_come_back_by_rank():
    for rank, (own_rank, world_size, total) in enumerate(run_distributed(_sum_of_ranks, 3, 10)):
        assert (own_rank, world_size, total.item()) == (rank, 3, 30)


def test_a_failing_rank_ends_the_others_and_shows_its_traceback():
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="(?s)rank 1 of 2.*_fail_on_rank_one.*the cause of it all"):
        run_distributed(_fail_on_rank_one, 2)
    assert time.monotonic() - begin < 20


def test_a_rank_that_dies_without_a_word_is_named():
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code 7"):
        run_distributed(_die_on_rank_one, 2)


def test_a_hanging_rank_is_named_and_killed():
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 did not finish within 3 s"):
        run_distributed(_hang_on_rank_one, 2, timeout=3)
