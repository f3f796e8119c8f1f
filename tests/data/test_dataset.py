"""--data-path and --split: what they mean and what they refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.data.dataset import BlendedDataset, PackedDataset, build_datasets, parse_data_path, parse_split, split_documents
from megacp.data.indexed_dataset import DatasetError
from tests.data.documents import numbered_documents, write_dataset


def ids_of(dataset):
    return {int(token) for i in range(len(dataset)) for token in dataset.tokens(i, 0, dataset.seq_length + 1)}


def test_parse_data_path():
    assert parse_data_path(["code"]) == [(1.0, "code")]
    assert parse_data_path(["0.3", "code", "7", "books"]) == [(0.3, "code"), (7.0, "books")]
    for bad, message in [
        ([], "takes one prefix"),
        (["a", "b", "c"], "takes one prefix, or pairs"),
        (["code", "books"], "before books, found 'code'"),
        (["0", "code", "1", "books"], "weight 0 of code must be above 0"),
        (["nan", "code"], "weight nan of code"),
    ]:
        with pytest.raises(DatasetError, match=f"--data-path.*{message}"):
            parse_data_path(bad)


def test_parse_split():
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("1") == (1, 0, 0) and parse_split("50, 50") == (0.5, 0.5, 0)
    for bad in ("", "a", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1"):
        with pytest.raises(DatasetError, match="--split .*such as 969,30,1"):
            parse_split(bad)


@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(sum), documents=st.integers(0, 10**12))
def test_split_partitions_the_documents(shares, documents):
    ranges = list(split_documents(",".join(map(str, shares)), documents).values())
    assert ranges[0][0] == 0 and ranges[-1][1] == documents
    for (first, stop), (following, _) in zip(ranges, ranges[1:]):
        assert first <= stop == following
    for (first, stop), share in zip(ranges, shares):
        assert abs((stop - first) - documents * share / sum(shares)) <= 1


def test_parts_do_not_share_documents(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([5] * 20))
    train, valid, test = build_datasets([str(tmp_path / "x")], "60,30,10", 4, seed=1)
    assert isinstance(train, PackedDataset) and ids_of(train) <= set(range(60))
    assert ids_of(valid) <= set(range(60, 90)) and ids_of(test) <= set(range(90, 100))


def test_parts_that_nobody_asked_for(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([5] * 20))
    path = [str(tmp_path / "x")]
    assert build_datasets(path, "100,0,0", 4, seed=1)[1:] == (None, None)
    train, *others = build_datasets(path, "969,30,1", 4, seed=1, parts=("train",))  # no document for test, none needed
    assert len(train) == (19 * 5 - 1) // 4 and others == [None, None]


def test_a_part_without_documents_names_split(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([5] * 20))
    with pytest.raises(DatasetError, match=r"--split 969,30,1 leaves no document of .*x \(20 documents\) for test"):
        build_datasets([str(tmp_path / "x")], "969,30,1", 4, seed=1)
    with pytest.raises(DatasetError, match="--seq-length 40 .*--split"):
        build_datasets([str(tmp_path / "x")], "90,5,5", 40, seed=1)


def test_blend_splits_each_dataset(tmp_path):
    write_dataset(tmp_path / "a", numbered_documents([5] * 10))
    write_dataset(tmp_path / "b", [[1000 + token for token in document] for document in numbered_documents([5] * 10)])
    train, valid, _ = build_datasets(["1", str(tmp_path / "a"), "3", str(tmp_path / "b")], "50,50", 4, seed=1)
    assert isinstance(train, BlendedDataset)
    assert ids_of(train) <= set(range(25)) | set(range(1000, 1025))
    assert ids_of(valid) <= set(range(25, 50)) | set(range(1025, 1050))
    from_b = sum("b.bin" in train.source(i) for i in range(400))
    assert abs(from_b - 300) <= 3
