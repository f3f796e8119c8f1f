"""Which samples a rank reads at a step: pure arithmetic on one global sample index.

The position in the data is one number, `consumed_samples`. Nothing else is saved, so a job resumes exactly, on any number of ranks.

Worked example: 12 samples a step, micro-batches of 2, data-parallel size 3, the first step.

    accumulation step      data rank 0   data rank 1   data rank 2
    0                      0  1          2  3          4  5
    1                      6  7          8  9          10 11

    >>> micro_batch_indices(0, 12, 2, data_rank=1, data_size=3)
    [[2, 3], [8, 9]]

The next step has consumed_samples = 12. All context-parallel ranks of one data rank share its samples: each reads its own tokens of
them. `balanced_micro_batches` deals the same samples out by their attention work.
"""

from collections.abc import Callable


def micro_batch_indices(
    consumed_samples: int, global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int
) -> list[list[int]]:
    """Global sample indices of data rank `data_rank`, one list of `micro_batch_size` per accumulation step.

    Micro-batch m of data rank r holds consumed_samples + (m * data_size + r) * micro_batch_size + [0, micro_batch_size).
    Raises ValueError when the ranks' micro-batches do not divide the global batch.
    """
    if micro_batch_size < 1:
        raise ValueError(f"--micro-batch-size {micro_batch_size} must be at least 1")
    if consumed_samples < 0:
        raise ValueError(f"consumed_samples {consumed_samples} must not be negative")
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data rank {data_rank} is not in [0, {data_size}), the data-parallel ranks")
    samples_at_once = micro_batch_size * data_size
    if global_batch_size < 1 or global_batch_size % samples_at_once:
        nearest = max(1, round(global_batch_size / samples_at_once)) * samples_at_once
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} x "
            f"data-parallel size {data_size} = {samples_at_once}; {nearest} is"
        )
    first_samples = range(consumed_samples + data_rank * micro_batch_size, consumed_samples + global_batch_size, samples_at_once)
    return [list(range(first, first + micro_batch_size)) for first in first_samples]


def balanced_micro_batches(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    cost: Callable[[int], int],
) -> list[list[int]]:
    """As micro_batch_indices, the samples of the step dealt out so that ranks that wait for each other have like work.

    `cost(sample)`: its attention work, the sum of its documents' lengths squared. Data ranks meet in every accumulation step, when
    weights are gathered, so a step takes the sum over its accumulation steps of the slowest rank's time. That is least when
    samples of like cost run at the same time: each accumulation step takes the most costly samples left, the largest first to
    the rank that has least in it, of equal ones to the rank that has least in the step so far.

    The samples of a step are the same as without, and depend on nothing else; so do its losses, to rounding.

    >>> costs = [9, 1, 1, 8, 5, 1, 2, 5]         # micro-batches of 1, data-parallel size 2
    >>> [balanced_micro_batches(0, 8, 1, rank, 2, costs.__getitem__) for rank in (0, 1)]
    [[[0], [7], [1], [2]], [[3], [4], [6], [5]]]

    Costs 9 5 1 1 and 8 5 2 1: the slowest rank of each accumulation step has 9 + 5 + 2 + 1 = 17, and each rank 16. In the order of
    the samples it would be 9 1 5 2 and 1 8 1 5: 9 + 8 + 5 + 5 = 27.
    """
    micro_batch_indices(consumed_samples, global_batch_size, micro_batch_size, data_rank, data_size)  # checks the numbers
    costs = {sample: cost(sample) for sample in range(consumed_samples, consumed_samples + global_batch_size)}
    costliest_first = sorted(costs, key=lambda sample: (-costs[sample], sample))
    so_far = [0] * data_size  # cost of each rank in this step
    mine = []
    for first in range(0, global_batch_size, micro_batch_size * data_size):
        micro_batches, loads = [[] for _ in range(data_size)], [0] * data_size
        for sample in costliest_first[first : first + micro_batch_size * data_size]:
            open_ranks = (rank for rank in range(data_size) if len(micro_batches[rank]) < micro_batch_size)
            rank = min(open_ranks, key=lambda rank: (loads[rank], so_far[rank], rank))
            micro_batches[rank].append(sample)
            loads[rank] += costs[sample]
            so_far[rank] += costs[sample]
        mine.append(sorted(micro_batches[data_rank]))
    return mine
