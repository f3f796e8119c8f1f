"""Training on a plan: epochs, ranks, resumption. The reference is the plan itself, read sequence by sequence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.batch import build_micro_batch
from megacp.data.dataset import BlendedDataset, PackedDataset, PlanDataset, build_dataset, build_datasets
from megacp.data.indexed_dataset import DatasetError
from megacp.data.sampler import micro_batch_indices
from megacp.kernels.cross_entropy import IGNORE_INDEX
from tests.data.documents import numbered_documents, write_dataset
from tests.data.test_packing_plan import PADDING, SEPARATOR, write

LENGTHS = [3, 70, 5, 0, 12, 4, 31, 8, 2, 2, 9]
SEQ_LENGTH = 16


@pytest.fixture
def plan(tmp_path):
    return write(tmp_path / "plan", [write_dataset(tmp_path / "x", numbered_documents(LENGTHS))], SEQ_LENGTH, SEPARATOR)


def test_an_epoch_is_every_token_once(plan):
    dataset = PlanDataset(plan, (0, len(plan)), SEQ_LENGTH, seed=3)
    orders = []
    for epoch in range(3):
        samples = range(epoch * len(dataset), (epoch + 1) * len(dataset))
        tokens = np.concatenate([dataset.tokens(i, 0, SEQ_LENGTH) for i in samples])
        assert sorted(tokens[tokens < SEPARATOR].tolist()) == list(range(sum(LENGTHS)))
        orders.append([dataset.sequence(i) for i in samples])
    assert len({tuple(order) for order in orders}) == 3  # every epoch has an order of its own
    other = PlanDataset(plan, (0, len(plan)), SEQ_LENGTH, seed=4)
    assert [other.sequence(i) for i in range(len(other))] != orders[0]


def test_any_order_of_access_gives_the_same_samples(plan):
    straight, other = (PlanDataset(plan, (0, len(plan)), SEQ_LENGTH, seed=3) for _ in range(2))
    expected = [straight.sequence(i) for i in range(6 * len(plan))]
    for i in np.random.default_rng(0).integers(0, len(expected), 200).tolist():
        assert other.sequence(i) == expected[i]


@pytest.mark.parametrize("context_size", [1, 2, 8])
def test_ranks_together_hold_the_sequence_and_no_label_of_padding(plan, context_size):
    dataset = PlanDataset(plan, (0, len(plan)), SEQ_LENGTH, seed=3)
    for i in range(len(dataset)):
        ranks = [build_micro_batch(dataset, [i], rank, context_size, vocab_size=10_000, eod=None) for rank in range(context_size)]
        ids = dataset.tokens(i, 0, SEQ_LENGTH + 1).tolist()
        assert [token for batch in ranks for token in batch.tokens_T.tolist()] == ids[:-1]
        labels = [label for batch in ranks for label in batch.labels_T.tolist()]
        assert labels == [label if label != PADDING else IGNORE_INDEX for label in ids[1:]]
        assert {batch.cu_seqlens for batch in ranks} == {tuple(plan.borders(dataset.sequence(i)).tolist())}
        assert sum(batch.valid_tokens for batch in ranks) == dataset.label_count(i)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(tmp_path_factory, data):
    """Stopped twice, each time continued on another number of ranks and another micro-batch."""
    folder = tmp_path_factory.mktemp("d")
    write(folder / "plan", [write_dataset(folder / "x", numbered_documents(LENGTHS))], SEQ_LENGTH)
    write_dataset(folder / "y", numbered_documents([20, 20, 20]))
    steps, batch = 9, 12

    def run(first, last, data_size, micro_batch):
        """The sequences of steps [first, last), in the order of the samples, as the ranks of a job started anew read them."""
        path = ["2", str(folder / "plan"), "1", str(folder / "y")]
        dataset = build_dataset(path, SEQ_LENGTH, seed=5)
        read = {}
        for step in range(first, last):
            for rank in range(data_size):
                for samples in micro_batch_indices(step * batch, batch, micro_batch, rank, data_size):
                    for i in samples:
                        assert i not in read
                        read[i] = dataset.tokens(i, 0, SEQ_LENGTH + 1).tolist()
        return [read[i] for i in sorted(read)]

    layouts = st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (12, 1)])
    stops = sorted(data.draw(st.lists(st.integers(0, steps), min_size=2, max_size=2)))
    resumed = []
    for first, last in zip([0, *stops], [*stops, steps]):
        resumed += run(first, last, *data.draw(layouts))
    assert resumed == run(0, steps, 1, batch) and len(resumed) == steps * batch


def test_data_path_takes_plans_with_weights_and_split(tmp_path, plan):
    folder = str(plan.folder)
    train, valid, _ = build_datasets([folder], "60,40,0", SEQ_LENGTH, seed=1)
    assert isinstance(train, PlanDataset) and len(train) + len(valid) == len(plan)
    parts = [{part.sequence(i) for i in range(len(part))} for part in (train, valid)]
    assert parts[0] | parts[1] == set(range(len(plan))) and not parts[0] & parts[1]
    blend = build_dataset(["3", folder, "1", str(tmp_path / "x")], SEQ_LENGTH, seed=1)
    assert isinstance(blend, BlendedDataset)
    assert [type(part) for part in blend.datasets] == [PlanDataset, PackedDataset]
    assert abs(sum("plan, sequence" in blend.source(i) for i in range(400)) - 300) <= 3
    with pytest.raises(DatasetError, match=r"--split 1000,1,0 leaves no sequence of .*plan \(\d+ sequences\) for valid"):
        build_datasets([folder], "1000,1,0", SEQ_LENGTH, seed=1)


def test_another_seq_length_names_the_flag(plan):
    with pytest.raises(DatasetError, match=r"--seq-length 32: .*plan is packed for --seq-length 16; train with that, or pack"):
        build_dataset([str(plan.folder)], 32, seed=1)


def test_a_folder_without_a_plan(tmp_path):
    with pytest.raises(DatasetError, match="is not a packing plan: no plan.json"):
        build_dataset([str(tmp_path)], 32, seed=1)
