"""The ladder's table, picture and JSON: what was measured, what was predicted and why; a run that is ended keeps what it has."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot
import pytest

from megacp.memory.units import GIB
from megacp.planning.ladder import PARTS, ladder
from megacp.training.capacity import job_of, parse_planned
from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "memory_ladder.py"
FLAGS = "--model llama-tiny --vocab-size 512 --mlp-tile-size 512 --loss-tile-size 512 --seq-length 4096".split()
FORMULA, NO_CODE = ("baseline", "+ FSDP", "+ Ulysses"), "megacp has no such code"


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def rungs_of(out: Path) -> dict[str, dict]:
    return {rung["name"]: rung for rung in json.loads((out / "memory_ladder.json").read_text())["rungs"]}


def test_predicted_table_picture_and_json(tool, tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    out = tmp_path / "a folder" / "ladder"
    assert tool.main([*FLAGS, "--gpus", "4", "--gpu-memory-gib", "0.05", "--measure", "none", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rungs = ladder(job_of(parse_planned(FLAGS, ""), 4, 4096)[1])
    assert len({len(line) for line in lines[:10]}) == 1  # aligned
    for line, rung in zip(lines[1:10], rungs, strict=True):
        assert line.startswith(rung.name) and f" {rung.how} " in line and f"{rung.total / GIB:.4f}" in line
    assert not any(line.startswith(("measured", "not measured")) for line in lines)
    pixels = matplotlib.image.imread(out / "memory_ladder.png")
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1200
    left, right = figures[-1].axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == [f"{rung.name}\n(predicted: {rung.how})" for rung in rungs]
    assert all(patch.get_hatch() for patch in (*left.patches, *right.patches))
    assert any("on the host" in text.get_text() for text in right.texts)
    found = rungs_of(out)
    assert [found[rung.name]["predicted_bytes"] for rung in rungs] == [rung.total for rung in rungs]
    assert not any(rung["measured"] for rung in found.values()) and set(tool.COLORS) == set(PARTS)


def test_a_measured_ladder_says_so_and_a_second_run_takes_what_is_there(tool, tmp_path, monkeypatch, capsys):
    flags = [*FLAGS, "--gpus", "4", "--gpu-memory-gib", "0.05", "--measure", "cpu", "--measure-layers", "2", "--out", str(tmp_path)]
    figures = []
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    assert tool.main([*flags, "--time-budget-s", "1e-9"]) == 0
    reasons = {rung["not_measured_because"] for rung in rungs_of(tmp_path).values()}
    assert reasons == {NO_CODE, "--time-budget-s 1e-09 was over"}
    assert f"not measured: {', '.join(FORMULA)}: {NO_CODE}" in capsys.readouterr().out.splitlines()

    measure, name = tool.LadderRehearsals.measure, "+ query chunks"

    def one(self, rung, seconds):  # so that the test is short
        if rung.name == name or rung.job is None:
            return measure(self, rung, seconds)
        raise tool.NotMeasured("out of GPU memory: a lot")

    monkeypatch.setattr(tool.LadderRehearsals, "measure", one)
    assert tool.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    found = rungs_of(tmp_path)
    assert [other for other in found if found[other]["measured"]] == [name]
    rung = found[name]
    assert rung["measured_bytes"] == pytest.approx(rung["predicted_bytes"], rel=0.01)
    assert rung["prediction_off"] == pytest.approx(rung["predicted_bytes"] / rung["measured_bytes"] - 1)
    assert rung["rehearsal"]["layers"] == 2 and rung["rehearsal"]["device"] == "cpu"
    (line,) = [line for line in lines if line.startswith(name) and " measured, 2 of 4 layers " in line]
    assert f"{rung['measured_bytes'] / GIB:.4f}" in line
    assert any(line.startswith("measured: 2 of 4 layers rehearsed on cpu, attention stub-fa4; states") for line in lines)
    assert any(line.startswith("not measured: + recompute, + offload") and line.endswith(": a lot") for line in lines)
    left, right = figures[-1].axes
    assert [bool(patch.get_hatch()) for patch in left.patches] == [other != name for other in found]
    assert len(right.lines) == 2  # the budget, and a mark on the measured bar

    assert tool.main([*flags, "--resume", "--rung-time-s", "0.01"]) == 0  # no time to measure it again
    assert rungs_of(tmp_path)[name] == rung
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    capsys.readouterr()
    assert tool.main([*flags, "--resume", "--measure", "none", "--measure-layers", "3"]) == 0
    assert rungs_of(tmp_path)[name]["measured_bytes"] == rung["measured_bytes"]
    assert "no picture" in (said := capsys.readouterr().out) and "--measure none --resume --out" in said

    report, picture = tmp_path / "rehearsals/query-chunks.json", tmp_path / "memory_ladder.png"
    table = tmp_path / "memory_ladder.json"
    before = picture.read_bytes(), table.read_bytes()
    capsys.readouterr()
    assert tool.main([*flags, "--resume", "--measure", "none", "--seq-length", "8192"]) == 1
    said = capsys.readouterr().err
    assert "has measured figures of llama-tiny, 4,096 tokens on 4 GPUs" in said and "none to replace them" in said
    assert tool.main([*flags, "--measure", "none"]) == 1 and "only predictions were asked for" in capsys.readouterr().err
    whole = report.read_text()
    report.write_text(whole[:100])  # of a run that was ended
    assert tool.main([*flags, "--resume", "--measure", "none"]) == 1 and f"{table} has" in capsys.readouterr().err
    assert (picture.read_bytes(), table.read_bytes()) == before
    report.write_text(whole)

    assert tool.main([*flags, "--rung-time-s", "0.01"]) == 0
    assert rungs_of(tmp_path)[name]["not_measured_because"] == "not done after 0.01 s"


def test_a_run_that_is_ended_takes_its_rehearsal_along_and_leaves_files(tmp_path):
    flags = [*FLAGS, "--gpus", "4", "--measure", "cpu", "--out", str(tmp_path)]
    run = subprocess.Popen([sys.executable, str(TOOL), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    log = tmp_path / "rehearsals" / "query-chunks.log"
    for _ in range(600):
        if log.exists() or run.poll() is not None:
            break
        time.sleep(0.1)
    (rehearsal,) = children_of(run.pid)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "interrupted" in err and "baseline" in out
    assert not Path(f"/proc/{rehearsal}").exists()
    assert len(rungs_of(tmp_path)) == 9 and (tmp_path / "memory_ladder.png").exists()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_errors_name_the_flag(tool, capsys, tmp_path):
    assert tool.main(["--model", "llama-tiny", "--gpus", "2"]) == 1
    assert "--seq-length is missing; --seq-length 1048576 works" in capsys.readouterr().err
    assert tool.main([*FLAGS, "--gpus", "6", "--context-parallel-size", "3"]) == 1
    assert "--context-parallel-size 3 does not divide" in capsys.readouterr().err
    assert tool.main([*FLAGS, "--gpus", "4", "--measure-layers", "1", "--out", str(tmp_path / "x")]) == 1
    assert "--measure-layers 1 has no layer between two others; 2 works" in capsys.readouterr().err
