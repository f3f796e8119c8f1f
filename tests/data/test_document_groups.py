"""Group files: which lines count as the same group, and what a file of another dataset is told by."""

import numpy as np
import pytest

from megacp.data.document_groups import groups_beside, read_groups
from megacp.data.indexed_dataset import DatasetError


def partition(groups):
    """[7, 3, 7] -> [0, 1, 0]: groups numbered by their first document."""
    first = {}
    return [first.setdefault(group, len(first)) for group in groups.tolist()]


@pytest.mark.parametrize(
    "rule, lines, expected",
    [
        ("key", ["a", "b", "a", "a "], [0, 1, 0, 2]),
        ("key", ["a", "", "", "a"], [0, 1, 2, 0]),  # without a key: each alone
        ("path:1", ["r/a.py", "s/a.py", "r/x/b.py", "./r//c.py"], [0, 1, 0, 0]),
        ("path:2", ["r/x/a.py", "r/y/a.py", "r/x/z/b.py", "r/top.py", "r/other.py"], [0, 1, 0, 2, 2]),
        ("path:1", ["a.py", "b.py"], [0, 1]),  # in no folder: each alone
        ("field:repo", ['{"repo": "a", "n": 1}', '{"n": 2, "repo": "b"}', '{"repo": "a"}', '{"repo": null}', ""], [0, 1, 0, 2, 3]),
        ("field:id", ['{"id": 1}', '{"id": "1"}', '{"id": 1}'], [0, 1, 0]),
    ],
)
def test_rules(tmp_path, rule, lines, expected):
    (tmp_path / "x.groups").write_bytes("\r\n".join(lines).encode() + b"\n")
    groups = read_groups(groups_beside(tmp_path / "x"), len(lines), rule)
    assert groups.dtype == np.int64 and partition(groups) == expected


def test_bad_files_and_rules(tmp_path):
    path = tmp_path / "x.groups"
    assert groups_beside(tmp_path / "x") is None
    path.write_text('{"repo": "a"}\nno json\n')
    for count, found in ((1, "more"), (3, "2")):
        with pytest.raises(DatasetError, match=f"x.groups: expected a line for each of the {count} documents, found {found}"):
            read_groups(path, count)
    with pytest.raises(DatasetError, match=r"x.groups: line 2 is no JSON with a field 'repo' .*: no json"):
        read_groups(path, 2, "field:repo")
    with pytest.raises(DatasetError, match="line 1 is no JSON with a field 'owner'"):
        read_groups(path, 2, "field:owner")
    for rule in ("path", "path:0", "path:x", "field:", "key:1", "folder"):
        with pytest.raises(DatasetError, match=f"--group-by {rule}: takes key, path:N or field:NAME"):
            read_groups(path, 2, rule)
