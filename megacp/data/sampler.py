"""Which samples a rank reads at a step: pure arithmetic on one global sample index.

The position in the data is one number, `consumed_samples`. Nothing else is saved, so a job resumes exactly, on any number of ranks.

Worked example: 12 samples a step, micro-batches of 2, data-parallel size 3, the first step.

    accumulation step      data rank 0   data rank 1   data rank 2
    0                      0  1          2  3          4  5
    1                      6  7          8  9          10 11

    >>> micro_batch_indices(0, 12, 2, data_rank=1, data_size=3)
    [[2, 3], [8, 9]]

The next step has consumed_samples = 12. All context-parallel ranks of one data rank share its samples: each reads its own tokens of
them.
"""


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
