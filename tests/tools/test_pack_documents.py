"""pack_documents as users run it: options, what is said, interruption at any moment, and what is refused."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megacp.data.manifest import MANIFEST, Manifest, describe_tokenizer
from megacp.data.packing_plan import PackingPlan
from megacp.data.tokenizer import ByteTokenizer
from megacp.data.verification import verify_plan
from tests.data.documents import numbered_documents, write_dataset
from tools import pack_documents

ROOT = Path(pack_documents.__file__).parent.parent


def run(tmp_path, *arguments, inputs=("x",), seq_length=16, output="plan"):
    flags = ["--input", *(str(tmp_path / name) for name in inputs), "--output", str(tmp_path / output)]
    pack_documents.main([*flags, "--seq-length", str(seq_length), *map(str, arguments)])
    return PackingPlan(tmp_path / output)


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_report_adds_up(tmp_path, capsys):
    write_dataset(tmp_path / "x", numbered_documents([3, 70, 0, 12]))
    write_dataset(tmp_path / "y", numbered_documents([2, 5]))
    run(tmp_path, "--separator", "7", "--drop-shorter-than", "3", "--histogram", tmp_path / "plan.png", inputs=("x", "y"))
    printed = capsys.readouterr().out
    assert "documents  6 = 3 that fit + 1 split + 1 empty + 1 dropped as short" in printed
    for line in re.findall(r"^(?:documents|tokens|positions) .*", printed, re.MULTILINE):
        sums = re.sub(r"\(.*?\)|in \d+ sequences.*", "", line)
        total, *parts = (int(number.replace(",", "")) for number in re.findall(r" ([\d,]+)(?= )", sums))
        assert total == sum(parts), line
    assert "train with --data-path" in printed and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "each of 90 tokens comes once; 2 were left out" in verify_plan(str(tmp_path / "plan"))[1]


def test_special_tokens(tmp_path):
    write_dataset(tmp_path / "x", [[5, 6, 9], [7, 9]])
    byte = ("--tokenizer-type", "Byte")
    assert run(tmp_path, output="a").tokens(0, 0, 7).tolist() == [5, 6, 9, 7, 9, 9, 9]  # the documents' own last token
    assert run(tmp_path, *byte, "--separator", "bos", output="b").tokens(0, 0, 7).tolist() == [5, 6, 9, 256, 7, 9, 257]
    assert run(tmp_path, *byte, "--padding-id", "0", output="c").tokens(0, 4, 7).tolist() == [9, 0, 0]


def test_groups_beside_the_dataset_and_named(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([9, 7, 3, 8, 4]))
    apart = run(tmp_path, output="apart")
    (tmp_path / "x.groups").write_text("r/a.py\ns/a.py\nr/b.py\nt.py\nr/c.py\n")

    def together(plan, documents):
        holding = [{piece.document for piece in plan.pieces(i)} for i in range(len(plan))]
        return any(set(documents) <= held for held in holding)

    assert not together(apart, [0, 2, 4])
    assert together(run(tmp_path, "--group-by", "path:1", output="paths"), [0, 2, 4])
    assert not together(run(tmp_path, output="unasked"), [0, 2, 4])
    (tmp_path / "g.jsonl").write_text('{"k": 1}\n{"k": 2}\n{"k": 1}\n{"k": 3}\n{"k": 2}\n')
    assert together(run(tmp_path, "--groups", tmp_path / "g.jsonl", "--group-by", "field:k", output="fields"), [1, 4])


def test_documents_without_a_group_are_alone_in_every_dataset(tmp_path):
    datasets = [write_dataset(tmp_path / name, numbered_documents([1, 1, 1])) for name in "xyz"]
    (tmp_path / "x.groups").write_text("a\n\nb\n")
    (tmp_path / "z.groups").write_text("b\n\n\n")
    args = pack_documents.parse_args(["--input", "x", "y", "z", "--output", "p", "--seq-length", "8", "--group-by", "key"])
    groups = pack_documents.document_groups(args, datasets).tolist()
    assert len(set(groups)) == 8 and groups[2] == groups[6]  # only the two b are of one group


def test_part_is_what_training_without_a_plan_takes(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([5] * 20))
    plan = run(tmp_path, "--split", "60,30,10", "--part", "valid")
    assert sorted(plan.documents.tolist()) == list(range(12, 18))


@pytest.fixture
def corpus(tmp_path):
    lengths = np.random.default_rng(0).lognormal(3, 1.5, 3000).astype(int)
    write_dataset(tmp_path / "x", [[7] * length for length in lengths])
    return tmp_path


def test_killed_at_every_step_of_writing(corpus, monkeypatch):
    """A child dies at its n-th call that changes the disk, for every n; what is under the plan's name is absent or whole."""
    expected = files_of(run(corpus, output="straight").folder)
    died = 0
    while True:
        child = os.fork()
        if child == 0:
            kill_at_call(monkeypatch, died)
            run(corpus)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        died += 1
        if (corpus / "plan").exists():
            assert files_of(corpus / "plan") == expected
            break
    assert died >= 15 and files_of(run(corpus).folder) == expected  # 6 arrays, each opened, written, synced; folders; rename
    assert not (corpus / "plan.incomplete").exists()


def kill_at_call(monkeypatch, count):
    """SIGKILL to this process at call number `count` of what writes, syncs, makes or renames."""
    left = [count]

    def dying(function):
        def call(*arguments, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*arguments, **options)

        return call

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (np, "save")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


def test_killed_at_20_random_moments(corpus):
    expected = files_of(run(corpus, output="straight").folder)
    started = time.monotonic()
    run(corpus, output="timed")
    seconds, kills = time.monotonic() - started, 0
    chance = random.Random(1)
    for attempt in range(20):
        child = os.fork()
        if child == 0:
            run(corpus, output=f"plan{attempt}")
            os._exit(0)
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert files_of(run(corpus, output=f"plan{attempt}").folder) == expected
    assert kills >= 10


def test_the_same_command_again_and_another_one(tmp_path, capsys):
    write_dataset(tmp_path / "x", numbered_documents([3, 20, 4]))
    before = files_of(run(tmp_path).folder)
    capsys.readouterr()
    run(tmp_path)
    assert "is there already, complete" in capsys.readouterr().out and files_of(tmp_path / "plan") == before
    with pytest.raises(SystemExit, match=r"holds another plan \(seq_length differ\); remove it"):
        run(tmp_path, seq_length=8)
    write_dataset(tmp_path / "x", numbered_documents([3, 20, 5]))
    with pytest.raises(SystemExit, match=r"holds another plan \(datasets differ\)"):
        run(tmp_path)
    assert files_of(tmp_path / "plan") == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--group-by", "path:1"], "--group-by path:1 needs a line for each document: .*x.groups does not exist"),
        (["--separator", "bos"], "--separator bos: needs the --tokenizer-model .*a token id such as 2 works"),
        (["--drop-shorter-than", "16"], "no sequence to plan; 3 documents with 27 tokens, of which 27 are left out"),
        (["--groups", "a", "b"], "--groups: 2 files for 1 --input"),
        (["--groups", "missing.groups"], "No such file.*missing.groups"),
        (["--separator", "258", "--tokenizer-type", "Byte"], "--separator 258: the tokenizer has the ids 0 to 257; 257 works"),
        (["--padding-id", "258", "--tokenizer-type", "Byte"], "--padding-id 258: the tokenizer has the ids 0 to 257; 257 works"),
        (["--histogram", "x.doc"], "--histogram x.doc: expected a name that ends in .png"),
        (["--histogram", "nowhere/x.png"], "--histogram nowhere/x.png: the folder nowhere does not exist"),
    ],
)
def test_refused(tmp_path, arguments, message):
    write_dataset(tmp_path / "x", numbered_documents([15, 8, 4]))
    with pytest.raises(SystemExit, match=f"(?s)pack_documents: .*{message}.*Nothing was written"):
        run(tmp_path, *arguments)
    assert not (tmp_path / "plan").exists()


def test_the_output_never_hides_a_dataset(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([15, 8, 4]))
    with pytest.raises(SystemExit, match="x is the prefix of a dataset, which .* no longer read; name another folder"):
        run(tmp_path, output="x")
    assert not (tmp_path / "x").exists()


def test_launched_by_its_path(tmp_path):
    write_dataset(tmp_path / "x", numbered_documents([3, 20, 4]))
    command = f"{sys.executable} tools/pack_documents.py --input {tmp_path}/x --output {tmp_path}/plan --seq-length".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "8"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 sequences of 8 tokens" in done.stdout
    done = subprocess.run([*command, "0"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--seq-length 0 must be at least 1" in done.stderr


def write_manifest(prefix, tokenizer):
    manifest = Manifest(describe_tokenizer(tokenizer, "tokenizer.model"), {}, [], {}, [])
    Path(f"{prefix}{MANIFEST}").write_text(manifest.to_json())


def test_manifests_tell_the_tokenizer(tmp_path):
    for name in "xyz":
        write_dataset(tmp_path / name, [[5, 6], [7]])
    write_manifest(tmp_path / "x", ByteTokenizer())
    plan = run(tmp_path, "--separator", "bos", inputs=("x", "y"))
    assert plan.separator == 256 and plan.padding == 257

    class Another(ByteTokenizer):
        fingerprint = "0" * 64

    write_manifest(tmp_path / "z", Another())
    with pytest.raises(SystemExit, match=r"x was made with Byte tokenizer.model \(sha256 .*z with .*preprocess them with one"):
        run(tmp_path, inputs=("x", "y", "z"), output="other")
    with pytest.raises(SystemExit, match=r"z was made with Byte tokenizer.model .* is another tokenizer"):
        run(tmp_path, "--tokenizer-type", "Byte", inputs=("z",), output="other")


def test_a_separator_outside_the_tokenizer_of_the_manifest(tmp_path):
    write_dataset(tmp_path / "x", [[5, 6], [7]])
    write_manifest(tmp_path / "x", ByteTokenizer())
    with pytest.raises(SystemExit, match="--separator 99999: the tokenizer has the ids 0 to 257; 257 works"):
        run(tmp_path, "--separator", "99999")
