"""The benchmark as its users run it, small on a CPU: every mode gives a table and files; what cannot run is refused with advice."""

import json
import shutil
from pathlib import Path

import pytest

from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "benchmark.py"
COMMON = "--device cpu --repeats 1".split()
LAYER = "layer --model llama-tiny --ranks 4 --mlp-tile-size 256".split()


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def rows_of(tool, folder, mode, flags):
    assert tool.main([mode, *COMMON, "--out", str(folder), *map(str, flags)]) == 0
    assert (folder / f"{mode}.csv").exists() and (folder / f"{mode}.png").exists()
    return json.loads((folder / f"{mode}.json").read_text())["rows"]


def test_layers_by_length_method_and_plan(tool, tmp_path, capsys):
    flags = [*LAYER[1:], "--seq-length", "1K", "512", "--activation-memory", "gpu", "lean"]
    rows = rows_of(tool, tmp_path, "layer", flags)
    described = [(row["seq_length"], row["plan"], row["method"]) for row in rows]
    assert described == [(s, plan, method) for s in (512, 1024) for plan in ("gpu", "lean") for method in ("upipe U=4", "a2a")]
    for row in rows:
        assert row["seconds"] > 0 and row["attention"] == "torch" and 0 < row["outside_share"] < 1
        shares = {phase: sum(p["exposed_share"] for p in row["parts"] if p["phase"] == phase) for phase in ("forward", "backward")}
        assert shares == pytest.approx({"forward": 1.0, "backward": 1.0})
        assert {part["part"] for part in row["parts"]} >= {"attention", "gemm", "element-wise"}
    text = capsys.readouterr().out
    assert "ceilings of this run: matmul float32" in text and text.count("upipe U=4") >= 4


def test_activations_on_disk_and_the_row_after_them(tool, tmp_path):
    flags = [*LAYER[1:], "--seq-length", "2K", "--heads-per-stage", "4", "--activation-memory", "disk", "lean"]
    disk, lean = rows_of(tool, tmp_path / "out", "layer", [*flags, "--disk-offload-dir", tmp_path])
    assert (disk["plan"], lean["plan"]) == ("disk", "lean") and lean["seconds"] > 0
    done = [{part["phase"]: part["work"] for part in row["parts"] if part["part"] == "gemm"} for row in (disk, lean)]
    assert done[0] == done[1]  # the same products, wherever the activations are


def test_attention_of_query_chunks_is_told_on_a_cpu_too(tool, tmp_path):
    flags = [*LAYER[1:], "--seq-length", "2K", "--heads-per-stage", "4", "--query-chunk", "256", "all"]
    chunked, whole = ({(p["phase"], p["part"]): p for p in row["parts"]} for row in rows_of(tool, tmp_path, "layer", flags))
    for phase in ("forward", "backward"):
        assert chunked[phase, "attention"]["work"] == whole[phase, "attention"]["work"]
        assert chunked[phase, "gemm"]["count"] == whole[phase, "gemm"]["count"]  # the same tiles are projected


def test_attention_by_backend_and_documents_skips_what_refuses(tool, tmp_path):
    flags = "--seq-length 512 --heads 2:1 --head-dim 16 --documents 1 8 --lengths equal uneven".split()
    rows = rows_of(tool, tmp_path, "attention", [*flags, "--attention-backend", "fa4", "torch", "reference"])
    assert [(r["documents"], r["lengths"]) for r in rows if r["backend"] == "torch"] == [(1, "equal"), (8, "equal"), (8, "uneven")]
    assert all("cannot serve" in row["problem"] for row in rows if row["backend"] == "fa4")
    for row in (row for row in rows if row["backend"] != "fa4"):
        assert row["first_forward_s"] > 0 and row["backward_s"] > 0
    whole, packed = (row for row in rows if row["backend"] == "torch" and row["lengths"] == "equal")
    assert whole["forward_tflops"] * whole["forward_s"] == pytest.approx(4 * 2 * 16 * (512 * 513 // 2) / 1e12)
    assert packed["backward_tflops"] * packed["backward_s"] == pytest.approx(10 * 2 * 16 * 8 * (64 * 65 // 2) / 1e12)


def test_the_output_head(tool, tmp_path):
    small, large = rows_of(tool, tmp_path, "head", "--model llama-tiny --tokens 512 1K --loss-tile-size 256".split())
    assert small["model_tflops"] * small["seconds"] == pytest.approx(6 * 4096 * 256 * 512 / 1e12)
    assert small["ms_per_4k_tokens"] == pytest.approx(1000 * small["seconds"] * 8)
    gradient = (1024 - 512) * 256 * 4 / 2**30  # what grows with the tokens: dh
    assert large["added_gib"] - small["added_gib"] == pytest.approx(gradient, rel=0.02)


def test_a_whole_rank(tool, tmp_path):
    flags = "--model llama-tiny --num-layers 2 --ranks 4 --seq-length 1K --pretrain-flags --mlp-tile-size 256 --vocab-size 1024"
    (row,) = rows_of(tool, tmp_path, "rank", flags.split())
    assert row["layers"] == 2 and row["method"] == "upipe U=4" and row["peak_gib"] > 0
    assert row["tokens_per_s_per_gpu"] == pytest.approx(256 / row["seconds"])
    assert {part["part"] for part in row["parts"]} >= {"attention", "mlp", "head", "other"}


@pytest.mark.parametrize(
    "changes, sequences, feed_forward, attention",
    [
        ("--global-batch-size 4 --micro-batch-size 2", 4, 768, 1), ("--ffn-hidden-size 64", 1, 64, 1),
        ("--rehearse-attention stub", 1, 768, 0),
    ],
)  # fmt: skip
def test_rates_of_a_rank_are_of_the_work_that_its_flags_make(tool, tmp_path, changes, sequences, feed_forward, attention):
    flags = f"--model llama-tiny --num-layers 1 --ranks 4 --seq-length 512 --pretrain-flags {changes}"
    (row,) = rows_of(tool, tmp_path, "rank", ["--warmup", 0, *flags.split()])
    tokens, pairs = sequences * 128, sequences * 512 * 513 // 2  # on the rank; of a head, over all ranks
    weights = 2 * 256 * 256 + 2 * 128 * 256 + 3 * feed_forward * 256 + 4096 * 256  # q and o; k and v; MLP; output head
    flops = 6 * weights * tokens + attention * 3 * 4 * 8 * 32 * pairs / 4
    assert row["tokens_per_s_per_gpu"] * row["seconds"] == pytest.approx(tokens)
    assert row["model_tflops"] * row["seconds"] == pytest.approx(flops / 1e12)


def test_what_pretrain_refuses_is_the_rows_problem(tool, tmp_path, capsys):
    flags = "rank --model llama-tiny --ranks 4 --seq-length 1K --pretrain-flags --loss-tile-size 0".split()
    assert tool.main([*flags[:1], *COMMON, *flags[1:]]) == 0
    assert "--loss-tile-size" in capsys.readouterr().out


def test_two_runs_in_one_picture(tool, tmp_path):
    rows_of(tool, tmp_path, "layer", [*LAYER[1:], "--seq-length", "1K", "--heads-per-stage", "4", "--no-profile"])
    files = [str(shutil.copy(tmp_path / "layer.json", tmp_path / name)) for name in ("before.json", "after.json")]
    assert tool.main(["plot", *files, "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_a_budget_of_no_time_measures_nothing_and_says_so(tool, capsys):
    assert tool.main([*LAYER, *COMMON, "--seq-length", "1K", "--time-budget-s", "0.01"]) == 0
    assert "left out: would take about" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--ranks 3", "--ranks 3 does not fit 8 query heads"),
        ("--seq-length 1001", "--seq-length 1001 is not a multiple of --ranks 4; 1000 is"),
        ("--heads-per-stage 6", "--heads-per-stage 6 must be a multiple"),
        ("--query-chunk 300", "--query-chunk 300 is not a multiple of --mlp-tile-size 256; 512 is"),
        ("--documents 4K --seq-length 1K", "--documents 4096 are more than --seq-length 1024"),
        ("--activation-memory disk", "--disk-offload-dir DIR"),
        ("--activation-memory gpu host --recompute-granularity none", "--activation-memory host contradicts"),
        ("--model llama-tinny", "llama-tiny is the nearest"),
        (f"--out {TOOL}", f"--out {TOOL}: {TOOL} is a file, not a folder"),
    ],
)
def test_flags_that_cannot_run_are_refused_at_once(tool, flags, message, capsys):
    assert tool.main([*LAYER, *COMMON, *flags.split()]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-length 4096", "--pretrain-flags --seq-length contradicts the row"),
        ("--mlp-tile-size 256 --dtype=x --bf16", "--pretrain-flags --bf16 contradicts the row"),
        ("--num-attention-heads 4", "--pretrain-flags --num-attention-heads contradicts the row"),
        ("--attention-mask=document", "counted by its own; a run without it works"),
    ],
)
def test_flags_that_would_measure_another_job_than_the_row_says_are_refused(tool, flags, message, capsys):
    assert tool.main(["rank", *COMMON, "--model", "llama-tiny", "--ranks", "4", "--pretrain-flags", *flags.split()]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_a_picture_has_a_form_that_can_be_drawn(tool, tmp_path, capsys):
    assert tool.main(["plot", str(tmp_path / "layer.json"), "--output", "x"]) == 1
    assert "--output x does not end in .png, .svg, .pdf; x.png works" in capsys.readouterr().err


def test_what_argparse_refuses(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main([*LAYER, "--seq-length", "1G"])
    assert "'1G' is not a number of tokens; 131072, 128K or 1M are" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main([*LAYER, "--attention-backend", "fa5"])
    assert "'fa5'" in capsys.readouterr().err
