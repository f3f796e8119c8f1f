"""A global batch as one rank reads it: its tokens of each micro-batch, by the flags of the run.

    for batch in read_micro_batches(dataset, consumed_samples, args, vocab_size, eod):      # one per accumulation step
        batch.tokens_T, batch.labels_T

Training and evaluation read through here, so that both mean the same by a flag, and so that what one rank cannot read ends the work
of all at the same place: a rank that raised alone would leave the others waiting for it, with nothing saved.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from megacp import parallel_state
from megacp.data.batch import PackedBatch, build_micro_batch
from megacp.data.dataset import SequenceDataset
from megacp.data.indexed_dataset import DatasetError
from megacp.data.packing import sum_squares
from megacp.data.sampler import balanced_micro_batches, micro_batch_indices
from megacp.training.resilience import any_rank


def read_micro_batches(
    dataset: SequenceDataset, consumed_samples: int, args: argparse.Namespace, vocab_size: int, eod: int | None
) -> list[PackedBatch]:
    """The global batch that begins at sample `consumed_samples`, read whole: a few MB. By all ranks at the same time.

    Raises DatasetError on every rank when any of them cannot read its part.
    """
    batches, error = [], None
    try:
        batches = list(_micro_batches(dataset, consumed_samples, args, vocab_size, eod))
    except (DatasetError, OSError) as unreadable:
        error = unreadable
    if any_rank(error is not None, parallel_state.get_data_parallel_group(with_context_parallel=True)):
        raise DatasetError(str(error or "another rank could not read its data")) from error
    return batches


def _micro_batches(
    dataset: SequenceDataset, consumed_samples: int, args: argparse.Namespace, vocab_size: int, eod: int | None
) -> Iterator[PackedBatch]:
    share = (
        consumed_samples, args.global_batch_size, args.micro_batch_size,
        parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size(),
    )  # fmt: skip

    def attention_work(sample: int) -> int:
        return sum_squares(np.diff(dataset.document_borders(sample)))

    for samples in balanced_micro_batches(*share, attention_work) if args.balance_batches else micro_batch_indices(*share):
        yield build_micro_batch(
            dataset, samples, parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size(),
            vocab_size=vocab_size, eod=eod, attention_mask=args.attention_mask,
            reset_position_ids=args.reset_position_ids, eod_mask_loss=args.eod_mask_loss,
        )  # fmt: skip
