"""A rank's share of a micro-batch, compared with the whole stream built by plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.batch import build_micro_batch
from megacp.data.indexed_dataset import DatasetError
from megacp.data.mock_dataset import MockDataset
from megacp.data.packed_dataset import PackedDataset
from tests.data.documents import ListedDataset, write_dataset

EOD = 0


@st.composite
def micro_batches(draw):
    """(dataset, sample indices, context size): any borders, any samples, any size that divides the stream."""
    seq_length, count = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    samples = []
    for _ in range(count):
        ids = draw(st.lists(st.integers(0, 9), min_size=seq_length + 1, max_size=seq_length + 1))
        inner = draw(st.sets(st.integers(1, seq_length - 1))) if seq_length > 1 else set()
        samples.append((ids, [0, *sorted(inner), seq_length]))
    indices = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    stream_length = seq_length * len(indices)
    size = draw(st.sampled_from([c for c in range(1, stream_length + 1) if stream_length % c == 0]))
    return ListedDataset(samples), indices, size


def whole_stream(dataset, indices, attention_mask, reset_position_ids, eod_mask_loss):
    """tokens, labels, positions, borders of the stream: one token at a time."""
    tokens, labels, positions, borders = [], [], [], [0]
    for number, sample in enumerate(indices):
        ids, document_borders = dataset.samples[sample]
        offset = number * dataset.seq_length
        for p in range(dataset.seq_length):
            document_start = max(border for border in document_borders if border <= p)
            tokens.append(ids[p])
            labels.append(-100 if eod_mask_loss and ids[p] == EOD else ids[p + 1])
            positions.append(p - document_start if reset_position_ids else p)
        borders += [offset + b for b in document_borders[1:]] if attention_mask == "document" else [offset + dataset.seq_length]
    return tokens, labels, positions, tuple(borders)


@settings(max_examples=150, deadline=None)
@given(case=micro_batches(), mask=st.sampled_from(["document", "causal"]), reset=st.booleans(), mask_eod=st.booleans())
def test_ranks_together_are_the_stream(case, mask, reset, mask_eod):
    dataset, indices, size = case
    tokens, labels, positions, borders = whole_stream(dataset, indices, mask, reset, mask_eod)
    batches = [
        build_micro_batch(
            dataset, indices, rank, size, vocab_size=10, eod=EOD,
            attention_mask=mask, reset_position_ids=reset, eod_mask_loss=mask_eod,
        )
        for rank in range(size)
    ]  # fmt: skip
    for name, expected in [("tokens_T", tokens), ("labels_T", labels), ("position_ids_T", positions)]:
        parts = [getattr(batch, name) for batch in batches]
        assert all(part.dtype == torch.int64 and len(part) == len(tokens) // size for part in parts)
        assert torch.cat(parts).tolist() == expected
    for batch in batches:
        assert batch.cu_seqlens == borders and batch.sequence_length == len(tokens)
        assert all(isinstance(border, int) for border in batch.cu_seqlens)
        assert batch.valid_tokens == sum(label != -100 for label in batch.labels_T.tolist())


@settings(max_examples=100, deadline=None)
@given(case=micro_batches())
def test_a_rank_reads_its_own_tokens_and_one_label_a_sequence(case):
    dataset, indices, size = case
    tokens_per_rank = dataset.seq_length * len(indices) // size
    for rank in range(size):
        dataset.reads.clear()
        build_micro_batch(dataset, indices, rank, size, vocab_size=10, eod=EOD)
        own = [
            (indices[place // dataset.seq_length], place % dataset.seq_length, place // dataset.seq_length)
            for place in range(rank * tokens_per_rank, (rank + 1) * tokens_per_rank)
        ]
        expected = []
        for number in sorted({number for _, _, number in own}):
            places = [place for _, place, sequence in own if sequence == number]
            expected.append((indices[number], places[0], places[-1] + 2))  # its tokens, and the label of the last
        assert dataset.reads == expected


def test_labels_are_the_tokens_shifted_by_one_on_packed_documents(tmp_path):
    """Across ranks, and across the sequence's end: the label of the last token is the token that follows on disk."""
    indexed = write_dataset(tmp_path / "x", [list(range(100))])
    packed = PackedDataset(indexed, (0, 1), 8, seed=0)
    for i in range(len(packed)):
        for rank in range(4):
            batch = build_micro_batch(packed, [i], rank, 4, vocab_size=100, eod=None)
            assert batch.labels_T.tolist() == [token + 1 for token in batch.tokens_T.tolist()]


def test_token_outside_the_vocabulary_names_file_and_flag(tmp_path):
    packed = PackedDataset(write_dataset(tmp_path / "x", [[3, 40, 5, 6, 7]]), (0, 1), 4, seed=0)
    build_micro_batch(packed, [0], 0, 1, vocab_size=41, eod=None)
    with pytest.raises(DatasetError, match=r"x\.bin: token id 40 .* outside --vocab-size 40; --vocab-size 41 or more"):
        build_micro_batch(packed, [0], 0, 1, vocab_size=40, eod=None)
    build_micro_batch(packed, [0], 1, 2, vocab_size=40, eod=None)  # not among this rank's tokens
    with pytest.raises(DatasetError, match="token id 40"):  # as a label only
        build_micro_batch(ListedDataset([([1, 40], [0, 1])]), [0], 0, 1, vocab_size=40, eod=None)
    with pytest.raises(DatasetError, match="token id -3 .* outside --vocab-size 40, or preprocess"):
        build_micro_batch(ListedDataset([([1, -3], [0, 1])]), [0], 0, 1, vocab_size=40, eod=None)


def test_a_rank_may_hold_only_masked_tokens():
    dataset = ListedDataset([([5, 5, EOD, EOD, 5], [0, 4])])
    batches = [build_micro_batch(dataset, [0], r, 2, vocab_size=9, eod=EOD, eod_mask_loss=True) for r in range(2)]
    assert [batch.valid_tokens for batch in batches] == [2, 0] and batches[1].labels_T.tolist() == [-100, -100]


def test_refusals():
    mock = MockDataset(100, 10, 0)
    with pytest.raises(ValueError, match="--seq-length 10 x --micro-batch-size 1 .* --context-parallel-size 4; --seq-length 12 is"):
        build_micro_batch(mock, [0], 0, 4, vocab_size=100, eod=None)
    with pytest.raises(ValueError, match="--attention-mask dense"):
        build_micro_batch(mock, [0], 0, 1, vocab_size=100, eod=None, attention_mask="dense")
    with pytest.raises(ValueError, match="--eod-mask-loss needs"):
        build_micro_batch(mock, [0], 0, 1, vocab_size=100, eod=None, eod_mask_loss=True)
