"""inspect_data as users run it: what it shows is what is in the files."""

import pytest

from megacp.data.indexed_dataset import IndexedDataset
from tests.data.documents import numbered_documents, write_dataset
from tools import inspect_data, pack_documents


def words(text):
    return [*text.encode(), 257]


@pytest.fixture
def data(tmp_path):
    """Texts under `x` as bytes, and a plan of sequences of 16 tokens under `plan`."""
    write_dataset(tmp_path / "x", [words("first document"), words("two"), words("a longer third document")])
    write_dataset(tmp_path / "y", numbered_documents([40, 50]))
    pack_documents.main(["--input", str(tmp_path / "x"), "--output", str(tmp_path / "plan"), "--seq-length", "16"])
    return tmp_path


def inspect(capsys, *arguments, code=0):
    capsys.readouterr()
    assert inspect_data.main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code and captured.err else captured.out


def test_stats(data, capsys):
    printed = inspect(capsys, "stats", data / "x", data / "plan", "--histogram", data / "x.png")
    assert "x: 3 documents, 43 tokens of int32" in printed and "4 least, 15 median, 14.3 mean, 24 most" in printed
    assert "plan of 3 sequences of 16 tokens, 89.583% filled, 4 pieces" in printed
    assert (data / "x.png").read_bytes().startswith(b"\x89PNG")


def test_show_document(data, capsys):
    byte = ("--tokenizer-type", "Byte")
    assert "first document" in inspect(capsys, "show", data / "x", "--document", 0, *byte)
    assert inspect(capsys, "show", data / "x", "--document", 2, "--start", 9, "--tokens", 5, *byte).endswith("\nthird\n")
    assert inspect(capsys, "show", data / "x", "--document", 1).endswith(f"\n{' '.join(map(str, words('two')))}\n")
    assert "--document 3: " in inspect(capsys, "show", data / "x", "--document", 3, code=1)
    assert "is a plan" in inspect(capsys, "show", data / "plan", "--document", 0, code=1)


def test_show_sequence(data, capsys):
    shown = "".join(inspect(capsys, "show", data / "plan", "--sequence", i, "--tokenizer-type", "Byte") for i in range(3))
    for text in ("x document 0  'first document'", "document 2 from its token 16  'ocument'", "x document 1  'two'", "padding"):
        assert text in shown
    assert "needs --seq-length" in inspect(capsys, "show", data / "x", "--sequence", 0, code=1)
    assert "2 documents" in inspect(capsys, "show", data / "y", "--sequence", 0, "--seq-length", 60)


def test_verify(data, capsys):
    assert inspect(capsys, "verify", data / "x", data / "plan", "--vocab-size", 258).count("good") == 2
    printed = inspect(capsys, "verify", data / "x", data / "plan", "--vocab-size", 257, code=1)
    assert printed.count("BAD") == 2 and printed.count("x.bin: token id 257 is outside --vocab-size 257; 258 or more") == 2
    with open(data / "x.bin", "ab") as file:
        file.write(b"\0\0\0\0")
    assert inspect(capsys, "verify", data / "x", data / "plan", data / "y", code=1).count("BAD") == 2


def test_verify_looks_at_the_ids_a_plan_adds(data, capsys):
    for flag, name in (("--separator", "separator"), ("--padding-id", "padding")):
        plan = data / name
        pack_documents.main(["--input", str(data / "x"), "--output", str(plan), "--seq-length", "32", flag, "300"])
        printed = inspect(capsys, "verify", plan, "--vocab-size", 300, code=1)
        assert f"{name}: token id 300 is outside --vocab-size 300; 301 or more" in printed
        assert "good" in inspect(capsys, "verify", plan, "--vocab-size", 301)


def test_merge_to_a_name_that_data_path_finds(data, capsys):
    for prefix, message in (
        (data / "plan", "is a packing plan, which --data-path would read instead"),
        (f"{data}/new/", f"takes a folder and a name, such as {data}/new/text"),
        (data / "all.bin", f"takes the name without the ending: {data}/all"),
    ):
        assert message in inspect(capsys, "merge", "--input", data / "x", "--output-prefix", prefix, code=1)
        assert not list(data.glob("all*")) + list(data.glob("plan.*")) + list(data.glob("new*"))


def test_a_picture_that_cannot_be_drawn_is_told_first(data, capsys):
    assert "x.doc: expected a name that ends in .png, .svg, .pdf" in inspect(
        capsys, "stats", data / "x", "--histogram", data / "x.doc", code=1
    )


def test_merge(data, capsys):
    assert "5 documents, 133 tokens" in inspect(capsys, "merge", "--input", data / "x", data / "y", "--output-prefix", data / "all")
    assert IndexedDataset(data / "all").read_document(4, 0, 3).tolist() == [40, 41, 42]
    assert "all.bin exists" in inspect(capsys, "merge", "--input", data / "x", "--output-prefix", data / "all", code=1)


def test_blend(data, capsys):
    blend = ("blend", "--seq-length", 16, "--samples", 40, "--data-path")
    printed = inspect(capsys, *blend, "1", data / "plan", "3", data / "y")
    rows = [line.split() for line in printed.splitlines() if line.endswith(("plan", "/y"))]
    assert [row[:5] for row in rows] == [["0.2500", "10", "25.00%", "3", "3.33"], ["0.7500", "30", "75.00%", "5", "6.00"]]
    alone = inspect(capsys, *blend, data / "plan")
    assert "1.0000            40  100.00%" in alone
    assert "--seq-length 8: " in inspect(capsys, "blend", "--seq-length", 8, "--data-path", data / "plan", code=1)
