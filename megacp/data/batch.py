"""One rank's share of a packed micro-batch.

Worked example: two sequences of 8 tokens on 4 context ranks, so S = 16 and T = 4. Sequence a holds documents of 3 and 5 tokens,
sequence b one document.

    stream            a0 a1 a2 | a3 a4 a5 a6 a7 | b0 b1 b2 b3 b4 b5 b6 b7
    rank                 0     .     1          .     2      .     3
    cu_seqlens        0, 3, 8, 16                 (attention_mask="causal": 0, 8, 16)

    rank 1:  tokens_T  a4 a5 a6 a7    labels_T  a5 a6 a7 a8    position_ids_T  4 5 6 7   (reset_position_ids: 1 2 3 4)

a8 is the token after sequence a. Rank 1 reads a4 to a8 and nothing else. The borders are those of the whole stream on every rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megacp.data.dataset import SequenceDataset
from megacp.data.indexed_dataset import DatasetError
from megacp.kernels.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of one context rank, and the document borders of the whole stream of S tokens."""

    tokens_T: torch.Tensor  # int64
    labels_T: torch.Tensor  # int64, IGNORE_INDEX where masked
    position_ids_T: torch.Tensor  # int64
    cu_seqlens: tuple[int, ...]  # attention borders over the stream: 0 ... S
    sequence_length: int  # S
    valid_tokens: int  # labels of this rank that are not masked


def build_micro_batch(
    dataset: SequenceDataset,
    sample_indices: list[int],
    context_rank: int,
    context_size: int,
    *,
    vocab_size: int,
    eod: int | None,
    attention_mask: str = "document",
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
) -> PackedBatch:
    """The tokens [c * T, (c + 1) * T) of the samples laid end to end, T = seq_length * len(sample_indices) / context_size.

    attention_mask: "document" puts a border at each document, "causal" only between sequences. reset_position_ids counts
    positions from the document's start rather than the sequence's; eod_mask_loss masks the label of each token that is `eod`.
    The three are independent. Labels of padding are always masked.

    Raises DatasetError for an id outside the vocabulary, ValueError for settings that do not fit.
    """
    seq_length = dataset.seq_length
    stream_length = seq_length * len(sample_indices)
    if stream_length % context_size:
        raise ValueError(
            f"--seq-length {seq_length} x --micro-batch-size {len(sample_indices)} = {stream_length} tokens is not a multiple "
            f"of --context-parallel-size {context_size}; --seq-length {-(-seq_length // context_size) * context_size} is"
        )
    if attention_mask not in ("document", "causal"):
        raise ValueError(f"--attention-mask {attention_mask} is neither document nor causal")
    if eod_mask_loss and eod is None:
        raise ValueError("--eod-mask-loss needs a tokenizer with an end-of-document id")
    tokens_per_rank = stream_length // context_size
    first, stop = context_rank * tokens_per_rank, (context_rank + 1) * tokens_per_rank

    cu_seqlens = [0]
    tokens_T, labels_T, position_ids_T = (np.empty(tokens_per_rank, dtype=np.int64) for _ in range(3))
    for number, sample in enumerate(sample_indices):
        offset = number * seq_length  # of this sequence in the stream
        start, end = max(first - offset, 0), min(stop - offset, seq_length)  # of this rank in the sequence
        borders = None
        if attention_mask == "document" or (reset_position_ids and start < end):
            borders = dataset.document_borders(sample)
        cu_seqlens += (borders[1:] + offset).tolist() if attention_mask == "document" else [offset + seq_length]
        if start >= end:
            continue
        ids = dataset.tokens(sample, start, end + 1)
        _check_vocabulary(ids, vocab_size, dataset, sample)
        mine = slice(offset + start - first, offset + end - first)
        tokens_T[mine], labels_T[mine] = ids[:-1], ids[1:]
        labels_T[mine][max(dataset.label_count(sample) - start, 0) :] = IGNORE_INDEX  # padding
        places = np.arange(start, end, dtype=np.int64)
        if reset_position_ids:
            places -= borders[np.searchsorted(borders, places, side="right") - 1]
        position_ids_T[mine] = places

    if eod_mask_loss:
        labels_T[tokens_T == eod] = IGNORE_INDEX
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T),
        labels_T=torch.from_numpy(labels_T),
        position_ids_T=torch.from_numpy(position_ids_T),
        cu_seqlens=tuple(cu_seqlens),
        sequence_length=stream_length,
        valid_tokens=int(np.count_nonzero(labels_T != IGNORE_INDEX)),
    )


def _check_vocabulary(ids: np.ndarray, vocab_size: int, dataset: SequenceDataset, sample: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        needed = f"; --vocab-size {high + 1} or more holds it" if low >= 0 else ""
        raise DatasetError(
            f"{dataset.source(sample)}: token id {bad} (sample {sample}) is outside --vocab-size {vocab_size}{needed}, or "
            "preprocess the data again with the tokenizer of this model"
        )
