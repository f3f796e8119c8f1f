"""`verify` finds what is wrong: each kind of damage, made on purpose."""

import hashlib
import json

import numpy as np
import pytest

from megacp.data.indexed_dataset import DatasetError
from megacp.data.manifest import MANIFEST, Manifest
from megacp.data.verification import token_range, verify_dataset, verify_plan
from tests.data.documents import numbered_documents, write_dataset
from tests.data.test_packing_plan import write


def test_dataset(tmp_path):
    prefix = str(tmp_path / "x")
    write_dataset(prefix, numbered_documents([4, 0, 3]))
    assert "3 documents (1 empty), 7 tokens of int32, ids 0 to 6" in verify_dataset(prefix, vocab_size=7)[0]
    with pytest.raises(DatasetError, match="x.bin: token id 6 is outside --vocab-size 6; 7 or more holds it"):
        verify_dataset(prefix, vocab_size=6)
    write_dataset(prefix, [[5, -1]])
    with pytest.raises(DatasetError, match="token id -1 is negative"):
        verify_dataset(prefix)
    write_dataset(prefix, [[]])
    assert "0 tokens" in verify_dataset(prefix, vocab_size=1)[0]


def test_ids_are_looked_at_a_piece_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("megacp.data.verification.SCAN_TOKENS", 4)
    assert token_range(write_dataset(tmp_path / "x", [[3] * 9 + [77], [4, 2, 5]])) == (2, 77)
    assert token_range(write_dataset(tmp_path / "empty", [[], []])) == (0, -1)


def test_hashes_of_the_manifest(tmp_path):
    prefix = str(tmp_path / "x")
    indexed = write_dataset(prefix, numbered_documents([4, 3]))
    hashes = {ending: hashlib.sha256((tmp_path / f"x.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx")}
    manifest = Manifest({}, {}, [], {}, [], {"sha256": hashes})
    (tmp_path / f"x{MANIFEST}").write_text(manifest.to_json())
    assert "are those of" in verify_dataset(prefix)[1]
    changed = bytearray(indexed.bin_path.read_bytes())
    changed[8] ^= 1
    indexed.bin_path.write_bytes(changed)
    with pytest.raises(DatasetError, match="x.bin: sha256 .* it was changed since"):
        verify_dataset(prefix)


def test_plan_is_sound(tmp_path):
    for separator in (None, 99):
        folder = tmp_path / f"plan{separator}"
        write(folder, [write_dataset(tmp_path / "x", numbered_documents([40, 0, 3, 9, 8]))], 16, separator, drop_shorter_than=4)
        assert "each of 57 tokens comes once; 3 were left out" in verify_plan(str(folder))[1]


@pytest.mark.parametrize(
    "name, place, change, message",
    [
        ("starts", 1, -16, "tokens that come twice"),
        ("starts", 0, 4, "tokens that come twice"),
        ("documents", -1, 1, "a document that is not there"),
        ("documents", -1, -1, "a piece outside its document"),
        ("offsets", 0, 1, "does not begin with a piece"),
        ("first_pieces", 1, -1, "a sequence without pieces"),
        ("filled", -1, 20, "overlaps the next or the border"),
        ("filled", -1, -1, "tokens where plan.json counts"),
        ("label_counts", 0, -1, "a wrong number of labels"),
    ],
)
def test_a_plan_that_does_not_add_up(tmp_path, name, place, change, message):
    """The checksums are made to agree, as if the packing itself were wrong."""
    write(tmp_path / "plan", [write_dataset(tmp_path / "x", numbered_documents([40, 9, 8, 12]))], 16)
    path = tmp_path / f"plan/{name}.npy"
    values = np.load(path)
    values[place] += change
    np.save(path, values)
    with pytest.raises(DatasetError, match=f"{name}.npy: changed since it was written"):
        verify_plan(str(tmp_path / "plan"))
    meta = json.loads((tmp_path / "plan/plan.json").read_text())
    meta["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "plan/plan.json").write_text(json.dumps(meta))
    with pytest.raises(DatasetError, match=message):
        verify_plan(str(tmp_path / "plan"))
