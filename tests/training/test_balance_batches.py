"""--balance-batches in the loop: the ranks get the samples that the sampler deals out, in the step's own set."""

import numpy as np
import torch

from megacp import parallel_state
from megacp.arguments import parse_args, validate_args
from megacp.parallel_state import ParallelLayout
from megacp.training.loop import TrainingRun
from tests.distributed import run_distributed

SEQ_LENGTH = 64


class DocumentsOfEqualLength:
    """Sample i is documents of 2^(i % 6) tokens, every token the number of the sample."""

    seq_length = SEQ_LENGTH

    def document_borders(self, i):
        return np.arange(0, SEQ_LENGTH + 1, 2 ** (i % 6))

    def tokens(self, i, start, stop):
        return np.full(stop - start, i)

    def label_count(self, i):
        return SEQ_LENGTH


def samples_of_a_step(rank, world_size, flags):
    """The sample of each accumulation step of this rank."""
    args = parse_args(f"--mock-data --seq-length {SEQ_LENGTH} --micro-batch-size 1 --global-batch-size 6 {flags}".split())
    validate_args(args, world_size)
    parallel_state.initialize_model_parallel(ParallelLayout(world_size))

    class Config:
        vocab_size = 100

    cpu = torch.device("cpu")
    run = TrainingRun(args, Config, None, None, None, DocumentsOfEqualLength(), None, cpu, None, consumed_samples=6)
    return [int(batch.tokens_T[0]) for batch in run._next_micro_batches()]


def test_ranks_get_samples_of_like_work():
    assert run_distributed(samples_of_a_step, 2, "") == [[6, 8, 10], [7, 9, 11]]
    first, second = run_distributed(samples_of_a_step, 2, "--balance-batches")
    assert list(zip(first, second)) == [(11, 10), (8, 9), (6, 7)]  # documents of 32 and 16, 8 and 4, 2 and 1 tokens
