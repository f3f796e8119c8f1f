"""Plans on disk: reads equal the pieces laid end to end, only what is asked for is read, and a stale plan is refused."""

import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.dataset import data_fingerprint
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.packing import pack
from megacp.data.packing_plan import ARRAYS, PADDING_DOCUMENT, PackingPlan, describe_datasets, is_plan, write_plan
from tests.data.documents import numbered_documents, write_dataset

SEPARATOR, PADDING = 9001, 9002


def write(folder, datasets, seq_length, separator=None, **options):
    lengths = np.concatenate([indexed.document_lengths for indexed in datasets])
    packing = pack(lengths, seq_length, separator=separator is not None, **options)
    write_plan(folder, packing, describe_datasets(datasets, folder), separator=separator, padding=PADDING, options=options)
    return PackingPlan(folder)


def laid_out(plan, documents):
    """The seq_length + 1 tokens of every sequence and its borders, by a plain loop over the arrays."""
    result = []
    for i, filled in enumerate(plan.filled.tolist()):
        ids, borders = [], []
        first, last = plan.first_pieces[i : i + 2].tolist()
        for piece in range(first, last):
            if piece > first and plan.separator is not None:
                ids.append(plan.separator)
            borders.append(len(ids))
            document, start = documents[plan.documents[piece]], int(plan.starts[piece])
            taken = document[start : start + plan.seq_length]  # a piece ends with its document or with the sequence
            ids += taken
        assert len(ids) == filled
        borders += range(filled, plan.seq_length, PADDING_DOCUMENT)
        rest = documents[plan.documents[last - 1]][int(plan.starts[last - 1]) + len(taken) :]
        follows = rest[0] if rest and filled == plan.seq_length else PADDING
        result.append((ids + [PADDING] * (plan.seq_length - filled) + [follows], [*borders, plan.seq_length]))
    return result


layouts = st.tuples(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=12).filter(any),
    st.integers(0, 12), st.integers(1, 16), st.booleans(),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(layout=layouts, cut=st.data())
def test_reads_are_the_pieces_laid_end_to_end(tmp_path_factory, layout, cut):
    lengths, first_of_second, seq_length, separator = layout
    folder = tmp_path_factory.mktemp("plan")
    documents = numbered_documents(lengths)
    datasets = [
        write_dataset(folder / name, part, max_sequence_tokens=7)
        for name, part in (("a", documents[:first_of_second]), ("b", documents[first_of_second:]))
    ]
    plan = write(folder / "plan", datasets, seq_length, SEPARATOR if separator else None)
    for i, (ids, borders) in enumerate(laid_out(plan, documents)):
        assert plan.tokens(i, 0, seq_length + 1).tolist() == ids
        assert plan.borders(i).tolist() == borders and (np.diff(plan.borders(i)) > 0).all()
        start = cut.draw(st.integers(0, seq_length + 1))
        stop = cut.draw(st.integers(start, seq_length + 1))
        piece = plan.tokens(i, start, stop)
        assert piece.dtype == np.int64 and piece.tolist() == ids[start:stop]
        assert [int(plan.tokens(i, place, place + 1)[0]) for place in range(seq_length + 1)] == ids
        filled = int(plan.filled[i])
        assert plan.label_count(i) == (filled if filled == seq_length and ids[-1] != PADDING else filled - 1)
    pieces = [piece for i in range(len(plan)) for piece in plan.pieces(i)]
    read = [piece.dataset.read_document(piece.document, piece.start, piece.start + piece.length).tolist() for piece in pieces]
    assert sorted(token for ids in read for token in ids) == list(range(sum(lengths)))


def test_a_read_touches_only_the_tokens_asked_for(tmp_path, monkeypatch):
    plan = write(tmp_path / "plan", [write_dataset(tmp_path / "x", numbered_documents([30, 5, 0, 70, 12]))], 16)
    touched, read = [], plan.datasets[0].read
    monkeypatch.setattr(plan.datasets[0], "read", lambda *where: touched.extend(read(*where).tolist()) or read(*where))
    for i in range(len(plan)):
        touched.clear()
        expected = [token for token in plan.tokens(i, 5, 12).tolist() if token != PADDING]
        assert touched == expected


def test_padding_costs_no_attention(tmp_path):
    """A tenth of a million-token sequence filled: attention over the rest as one document would be 81 times the work."""
    seq_length = 2**20
    plan = write(tmp_path / "plan", [write_dataset(tmp_path / "x", [[7] * 100_000])], seq_length)
    lengths = np.diff(plan.borders(0))
    assert lengths[0] == 100_000 and lengths.sum() == seq_length
    assert (lengths[1:] ** 2).sum() < 0.5 * 100_000**2


def test_plan_and_datasets_move_together(tmp_path):
    (tmp_path / "old").mkdir()
    plan = write(tmp_path / "old/plan", [write_dataset(tmp_path / "old/x", numbered_documents([30, 5]))], 16)
    expected = [plan.tokens(i, 0, 17).tolist() for i in range(len(plan))]
    os.rename(tmp_path / "old", tmp_path / "new")
    moved = PackingPlan(tmp_path / "new/plan")
    assert [moved.tokens(i, 0, 17).tolist() for i in range(len(moved))] == expected
    (tmp_path / "link").symlink_to(tmp_path / "new/plan")
    assert len(PackingPlan(tmp_path / "link")) == len(expected)


@pytest.mark.parametrize("change", [[[1, 2, 3], [4]], [[1, 2], [3, 4, 4]], [[1, 2], [3, 9]]])
def test_another_dataset_under_the_name_is_refused(tmp_path, change):
    write(tmp_path / "plan", [write_dataset(tmp_path / "x", [[1, 2], [3, 4]])], 4)
    write_dataset(tmp_path / "x", change)
    with pytest.raises(DatasetError, match=r"plan: .*x is not the dataset that was packed: .* packed were 2 with 4"):
        PackingPlan(tmp_path / "plan")
    for ending in ("bin", "idx"):
        (tmp_path / f"x.{ending}").unlink()
    with pytest.raises(DatasetError, match="x.idx does not exist"):
        PackingPlan(tmp_path / "plan")


@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_plan_is_refused(tmp_path, name):
    write(tmp_path / "plan", [write_dataset(tmp_path / "x", numbered_documents([30, 5, 9]))], 16)
    path = tmp_path / f"plan/{name}.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DatasetError, match=f"{name}.npy: missing or damaged.*pack again"):
        PackingPlan(tmp_path / "plan")
    np.save(path, np.zeros(1, dtype=np.int64))
    with pytest.raises(DatasetError, match="pack again"):
        PackingPlan(tmp_path / "plan")
    np.save(path, np.zeros(3, dtype=np.int32))
    with pytest.raises(DatasetError, match=f"{name}.npy: missing or damaged .*expected a list of int64.*pack again"):
        PackingPlan(tmp_path / "plan")
    for place in range(90):  # a byte of the header, which says what the rest is
        path.write_bytes(whole[:place] + b"\x05" + whole[place + 1 :])
        with pytest.raises(DatasetError, match="pack again"):
            PackingPlan(tmp_path / "plan")
    path.unlink()
    with pytest.raises(DatasetError, match=f"{name}.npy: missing"):
        PackingPlan(tmp_path / "plan")


def test_a_folder_that_is_no_plan_says_so(tmp_path):
    (tmp_path / "plan.incomplete").mkdir()
    (tmp_path / "plan").mkdir()
    with pytest.raises(DatasetError, match="plan is not a packing plan: no plan.json in it; pack_documents.py was stopped"):
        PackingPlan(tmp_path / "plan")
    for text, message in (("{", "not JSON"), ('{"format": "x"}', "expected 'megacp packing plan' version 1"), ("[]", "expected")):
        (tmp_path / "plan/plan.json").write_text(text)
        with pytest.raises(DatasetError, match=f"plan.json: {message}"):
            PackingPlan(tmp_path / "plan")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    indexed = write_dataset(tmp_path / "x", numbered_documents([30, 5, 9]))

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megacp.data.packing_plan.np.save", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "plan", [indexed], 16)
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"] and not is_plan(tmp_path / "plan")
    assert IndexedDataset(tmp_path / "x").num_tokens == 44


def test_a_fingerprint_is_of_what_is_read_wherever_it_lies(tmp_path):
    documents = numbered_documents([5, 9, 3, 12])
    (tmp_path / "a").mkdir()
    indexed = write_dataset(tmp_path / "a" / "x", documents)
    plan = write(tmp_path / "a" / "plan", [indexed], 8)
    found = data_fingerprint([str(plan.folder)])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert data_fingerprint([str(tmp_path / "b" / "plan")]) == found
    for number, other in enumerate([dict(seq_length=9), dict(seq_length=8, separator=SEPARATOR), dict(seq_length=8, drop_shorter_than=4)]):
        assert data_fingerprint([str(write(tmp_path / f"plan{number}", [indexed], **other).folder)]) != found
    same_lengths = write_dataset(tmp_path / "y", [document[::-1] for document in documents])
    assert data_fingerprint([str(tmp_path / "y")]) != data_fingerprint([indexed.prefix]) != found
    assert data_fingerprint(["1", indexed.prefix, "2", same_lengths.prefix]) != data_fingerprint([indexed.prefix])
