"""Tables line up, files are whole after every row, a stopped run leaves its rows, the time budget is kept, pictures are drawn."""

import csv
import json
import time

import matplotlib.image
import pytest
import torch

from megacp.argument_checks import ArgumentError
from megacp.benchmark.ceilings import Ceilings
from megacp.benchmark.kernel_classes import Span
from megacp.benchmark.kernel_profile import Phase
from megacp.benchmark.picture import draw, lines_of
from megacp.benchmark.report import Column, Report
from megacp.benchmark.roofline import outside_share, roofline
from megacp.benchmark.runner import SETUP_S, Runner

COLUMNS = [
    Column("seq_length", "length", "tokens", 8), Column("method", "method", "", 10), Column("seconds", "s", ".3f", 8),
    Column("matmul_share", "% matmul", "%", 8),
]  # fmt: skip
CEILINGS = Ceilings(side=8192, dtype="bfloat16", matmul=800e12, device_copy=4e12, to_host=50e9, to_device=60e9)
ENVIRONMENT = {"device": "some GPU", "commit": "abc1234"}


def report_in(folder):
    return Report("layer", COLUMNS, ENVIRONMENT, CEILINGS, str(folder))


def row(length, method="a2a", **figures):
    return {"seq_length": length, "method": method, "seconds": 1.5, "matmul_share": 0.625, "tokens_per_s_per_gpu": 10.0,
            "peak_gib": 3.0} | figures  # fmt: skip


def test_the_table_lines_up_and_a_row_without_figures_says_why(tmp_path, capsys):
    report = report_in(tmp_path)
    report.add(row(131072))
    report.add(row(1000, "upipe U=8", matmul_share=None))
    report.add({"seq_length": 5242880, "method": "a2a", "problem": "out of GPU memory"})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "  length      method         s  % matmul",
        "    128K         a2a     1.500      62.5",
        "    1000   upipe U=8     1.500         -",
        "      5M         a2a  out of GPU memory",
    ]


def test_files_are_whole_after_every_row(tmp_path):
    report = report_in(tmp_path / "a" / "folder")
    parts = [{"phase": "forward", "part": "gemm", "exposed_s": 1.0, "exposed_share": 0.5}]
    for count, added in enumerate((row(1024), row(2048, extra=7), {"seq_length": 4096, "method": "a2a", "problem": "no"}), 1):
        report.add(added, parts if count == 2 else None)
        folder = tmp_path / "a" / "folder"
        content = json.loads((folder / "layer.json").read_text())
        assert len(content["rows"]) == count and content["environment"] == ENVIRONMENT and content["ceilings"]["matmul"] == 800e12
        with (folder / "layer.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(r["seq_length"]) for r in rows] == [1024, 2048, 4096][:count]
    assert rows[1]["extra"] == "7" and rows[0]["extra"] == "" and rows[2]["problem"] == "no"
    with (folder / "layer_parts.csv").open() as file:
        (part,) = csv.DictReader(file)
    assert (part["seq_length"], part["method"], part["part"], part["exposed_s"]) == ("2048", "a2a", "gemm", "1.0")
    assert not list(folder.glob("*.tmp"))


def test_no_file_of_an_earlier_run_stays_beside_the_rows_of_another(tmp_path):
    report_in(tmp_path).add(row(1024), [{"phase": "forward", "part": "gemm", "exposed_s": 1.0, "exposed_share": 0.5}])
    (tmp_path / "layer.png").touch()
    later = report_in(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4  # nothing measured, nothing lost
    later.add(row(2048))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.csv", "layer.json"]


def test_an_interrupted_run_keeps_its_rows(tmp_path):
    runner = Runner(report_in(tmp_path), rate=1e12, time_budget_s=None, start=time.monotonic())

    def interrupted():
        raise KeyboardInterrupt

    runner.run({"seq_length": 1024, "method": "a2a"}, 1.0, 1, lambda: ({"seconds": 0.1}, []))
    with pytest.raises(KeyboardInterrupt):
        runner.run({"seq_length": 2048, "method": "a2a"}, 1.0, 1, interrupted)
    assert [r["seconds"] for r in json.loads((tmp_path / "layer.json").read_text())["rows"]] == [0.1]


@pytest.mark.parametrize(
    "error, problem",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB"), "out of GPU memory: CUDA out of memory"),
        (ValueError("--attention-backend fa4 cannot serve"), "--attention-backend fa4 cannot serve"),
        (ArithmeticError("the gradient is not finite"), "the gradient is not finite"),
    ],
)
def test_what_fails_for_a_reason_is_a_row_and_the_next_runs(error, problem, tmp_path):
    def failing():
        raise error

    runner = Runner(report_in(tmp_path), rate=1e12, time_budget_s=None, start=time.monotonic())
    runner.run({"seq_length": 1024}, 1.0, 1, failing)
    runner.run({"seq_length": 2048}, 1.0, 1, lambda: ({"seconds": 0.1}, []))
    first, second = runner.report.rows
    assert first == {"seq_length": 1024, "problem": problem} and second["seconds"] == 0.1


def test_a_mistake_of_the_program_is_not_a_row(tmp_path):
    runner = Runner(report_in(tmp_path), rate=1e12, time_budget_s=None, start=time.monotonic())
    with pytest.raises(KeyError):
        runner.run({"seq_length": 1024}, 1.0, 1, lambda: {}["missing"])


def test_a_row_that_would_end_too_late_is_left_out_by_the_pace_of_shorter_ones(tmp_path, capsys):
    """100 s, 1 FLOP/s expected. A row of 30 FLOPs took 2 s: one of 200 fits, one of 20,000 does not. A new kind is guessed."""
    runner = Runner(report_in(tmp_path), rate=1.0, time_budget_s=100.0, start=time.monotonic())
    ran = []

    def measured(name):
        return lambda: (ran.append(name) or {"seconds": 2.0}, [])

    runner.run({"seq_length": 1, "method": "a2a"}, 30.0, 3, measured("short"))
    runner.run({"seq_length": 10, "method": "a2a"}, 200.0, 3, measured("long"))
    runner.run({"seq_length": 20, "method": "a2a"}, 20_000.0, 1, measured("too long"))
    runner.run({"seq_length": 20, "method": "upipe U=8"}, 90.0, 1, measured("other kind"))
    runner.run({"seq_length": 20, "method": "upipe U=4"}, 101.0 - SETUP_S, 1, measured("other kind, too long"))
    assert ran == ["short", "long", "other kind"]
    problems = [r["problem"] for r in runner.report.rows if "problem" in r]
    assert len(problems) == 2 and all("are left of --time-budget-s 100" in problem for problem in problems)


def test_roofline_rates_and_shares_by_hand():
    spans = [
        Span("nvjet", 0.0, 2.0), Span("flash_fwd", 2.0, 3.0), Span("Memcpy DtoD (Device -> Device)", 3.0, 3.5, int(1e12)),
        Span("Memcpy DtoH (Device -> Pinned)", 0.0, 4.0, int(100e9)), Span("rms_norm", 3.5, 4.0),
    ]  # fmt: skip
    flops = {"forward": {"gemm": int(1200e12), "attention": int(600e12)}}
    parts = {part["part"]: part for part in roofline({"forward": Phase(spans, wall_s=5.0)}, flops, CEILINGS)}
    assert parts["gemm"]["rate"] == 600e12 and parts["gemm"]["ceiling_share"] == 0.75
    assert parts["attention"]["rate"] == 600e12 and parts["attention"]["exposed_share"] == pytest.approx(0.2)
    assert parts["device copies"]["rate"] == pytest.approx(4e12) and parts["device copies"]["ceiling_share"] == pytest.approx(1.0)
    assert parts["host copies"]["rate"] == pytest.approx(25e9) and parts["host copies"]["ceiling_share"] == pytest.approx(0.5)
    assert parts["host copies"]["exposed_s"] == 0.0 and "rate" not in parts["element-wise"]
    assert parts["idle"]["exposed_s"] == pytest.approx(1.0) and "collectives" not in parts
    assert outside_share(list(parts.values())) == pytest.approx(2 / 5)


def test_a_line_of_the_picture_is_what_differs_only_in_length(tmp_path):
    contents = [{"rows": [row(2048), row(1024), row(1024, "upipe U=8"), {"seq_length": 4096, "method": "a2a", "problem": "no"}]}]
    lines = lines_of(contents, [tmp_path / "layer.json"])
    lengths = {label: [length for length, _ in points] for label, points in lines.items()}
    assert lengths == {"a2a": [1024, 2048], "upipe U=8": [1024]}


def test_pictures_of_one_run_and_of_two_together(tmp_path):
    for name in ("one", "two"):
        report = report_in(tmp_path / name)
        report.add(row(1024))
        report.add(row(2048, tokens_per_s_per_gpu=8.0, peak_gib=5.0))
    files = [tmp_path / name / "layer.json" for name in ("one", "two")]
    draw(files, tmp_path / "new" / "both.png")
    pixels = matplotlib.image.imread(tmp_path / "new" / "both.png")
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1200
    labels = lines_of([json.loads(file.read_text()) for file in files], files)
    assert list(labels) == [str(tmp_path / "one" / "layer"), str(tmp_path / "two" / "layer")]


def test_what_cannot_be_drawn_says_why(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ArgumentError, match="broken.json: not the JSON of a benchmark"):
        draw([tmp_path / "broken.json"], tmp_path / "x.png")
    report_in(tmp_path).add({"seq_length": 1, "problem": "no"})
    with pytest.raises(ArgumentError, match="no row with figures"):
        draw([tmp_path / "layer.json"], tmp_path / "x.png")
    Report("head", COLUMNS, ENVIRONMENT, CEILINGS, str(tmp_path)).add(row(1))
    with pytest.raises(ArgumentError, match="one mode at a time"):
        draw([tmp_path / "layer.json", tmp_path / "head.json"], tmp_path / "x.png")
