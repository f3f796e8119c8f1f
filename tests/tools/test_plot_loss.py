"""The picture is the first thing that a newcomer sees of a run."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "plot_loss.py"


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def write_run(path, losses, end=""):
    path.write_text("".join(json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses, 1)) + end)
    return str(path)


def test_one_command_makes_a_picture(tmp_path):
    run = write_run(tmp_path / "run.jsonl", np.linspace(8, 3, 200).tolist())
    command = [sys.executable, str(TOOL), run, "--output", str(tmp_path / "a folder" / "loss.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss.png" in done.stdout
    pixels = matplotlib.image.imread(tmp_path / "a folder" / "loss.png")
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1000
    assert 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5  # neither empty nor full


def test_the_curves_are_the_files(tool, tmp_path, monkeypatch):
    a, b = [5.0, 4.0, 3.5], [6.0, 5.0, 4.5, 4.25]
    files = [write_run(tmp_path / "a.jsonl", a), write_run(tmp_path / "b.jsonl", b)]
    figures = []
    monkeypatch.setattr(tool.plt, "close", figures.append)
    assert tool.main([*files, "--labels", "one", "two", "--output", str(tmp_path / "x.png")]) == 0
    axes = figures[0].axes[0]
    for line, losses in zip(axes.lines, (a, b), strict=True):
        assert line.get_ydata().tolist() == losses
        assert line.get_xdata().tolist() == list(range(1, len(losses) + 1))
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["one: 3.5000 at step 3", "two: 4.2500 at step 4"]


def test_long_runs_show_every_step_and_the_mean(tool, tmp_path, monkeypatch):
    losses = np.random.default_rng(0).normal(3, 1, 400)
    figures = []
    monkeypatch.setattr(tool.plt, "close", figures.append)
    run = write_run(tmp_path / "a.jsonl", losses.tolist())
    assert tool.main([run, "--smooth", "51", "--output", str(tmp_path / "x.png")]) == 0
    raw, mean = (line.get_ydata() for line in figures[0].axes[0].lines)
    np.testing.assert_array_equal(raw, losses)
    assert mean[200] == pytest.approx(losses[175:226].mean())
    assert mean[100:].std() < 0.5 * raw.std()
    (label,) = figures[0].axes[0].get_legend().get_texts()
    assert label.get_text() == f"a: {losses[-51:].mean():.4f}, mean of the last 51 of 400 steps"


@pytest.mark.parametrize("window", [1, 2, 3, 8, 100])
def test_the_mean_is_the_plain_loops(tool, window):
    values = np.random.default_rng(1).normal(size=23)
    expected = []
    for i in range(23):
        left, right = min(i, window // 2), min(i, (window - 1) // 2, 22 - i)
        expected.append(sum(values[i - left : i + right + 1]) / (left + 1 + right))
    np.testing.assert_allclose(tool.centred_mean(values, window), expected)


def test_the_mean_keeps_a_steep_start(tool):
    np.testing.assert_allclose(tool.centred_mean(np.arange(99.0), 21)[:80], np.arange(80.0))


def test_docstring_examples_are_true(tool):
    assert doctest.testmod(tool).failed == 0


def test_a_run_that_is_still_going_can_be_drawn(tool, tmp_path):
    run = write_run(tmp_path / "a.jsonl", [3.0, None, 2.0], end='{"step": 4, "lo')
    steps, losses = tool.read_losses(run)
    assert steps.tolist() == [1, 3] and losses.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    "text, named", [("", "no step"), ("hello\n", "line 1"), ('{"step": 1, "loss": 1}\n{"a": 1}\n', "line 2")]
)
def test_what_is_no_log_is_named(tool, tmp_path, capsys, text, named):
    (tmp_path / "a.jsonl").write_text(text)
    assert tool.main([str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x.png")]) == 1
    error = capsys.readouterr().err
    assert "a.jsonl" in error and named in error
    assert not (tmp_path / "x.png").exists()


def test_a_missing_file_and_wrong_labels_are_named(tool, tmp_path, capsys):
    assert tool.main([str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["a", "b", "--labels", "one"])
    assert "--labels: 1 for 2 files" in capsys.readouterr().err
