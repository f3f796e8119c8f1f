"""The scripts that install and launch, with a stand-in for the environment's Python that writes down what it is asked to do."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in "-c import sys; print(sys.prefix)") echo "{prefix}" ;; esac
"""


@pytest.fixture
def environment(tmp_path):
    """An active virtual environment with torch in it and nothing else. Returns (variables, log of its python)."""
    prefix, log = tmp_path / "an environment", tmp_path / "asked"
    (prefix / "bin").mkdir(parents=True)
    python = prefix / "bin" / "python"
    python.write_text(STAND_IN.format(log=log, prefix=prefix))
    python.chmod(0o755)
    (prefix / "bin" / "torchrun").symlink_to(python)
    return os.environ | {"VIRTUAL_ENV": str(prefix), "OUT": str(tmp_path / "out")}, log


def bash(command, variables, cwd=ROOT):
    return subprocess.run(["bash", *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def installs(log):
    return [line for line in log.read_text().splitlines() if line.startswith("-m pip install")]


def test_arguments_of_a_script_are_not_taken_for_requirement_files(environment, tmp_path):
    variables, log = environment
    script = tmp_path / "launch.sh"
    script.write_text(f'set -euo pipefail\n. "{ROOT}/examples/setup_env.sh"\nprintf "%s\\n" "$PYTHON" "$(command -v torchrun)" "$@"\n')
    done = bash([script, "--train-iters", "6"], variables, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    prefix = variables["VIRTUAL_ENV"]
    assert done.stdout.splitlines()[-4:] == [f"{prefix}/bin/python", f"{prefix}/bin/torchrun", "--train-iters", "6"]
    assert installs(log) == [
        f"-m pip install --quiet --requirement {ROOT}/requirements.txt",
        f"-m pip install --quiet --no-deps --editable {ROOT}",
    ]
    assert bash([script], variables, cwd=tmp_path).returncode == 0
    assert len(installs(log)) == 2, "a second run installs nothing"


def test_the_tests_install_what_they_need_and_hand_their_arguments_to_pytest(environment):
    variables, log = environment
    done = bash(["tests/run.sh", "tests/kernels", "-k", "rotary"], variables)
    assert done.returncode == 0, done.stderr
    assert installs(log)[0].endswith(f"--requirement {ROOT}/requirements.txt --requirement {ROOT}/requirements-test.txt")
    assert log.read_text().splitlines()[-1].endswith("tests/kernels -k rotary")


def test_the_quickstart_hands_its_arguments_to_the_training(environment):
    variables, log = environment
    done = bash(["examples/quickstart.sh", "--train-iters", "6"], variables | {"NPROC": "2"})
    assert done.returncode == 0, done.stderr
    (training,) = [line for line in log.read_text().splitlines() if "pretrain_llama.py" in line]
    assert training.endswith("--train-iters 6")


@pytest.mark.parametrize("script", sorted(map(str, [*ROOT.glob("examples/*.s*"), ROOT / "tests/run.sh", ROOT / ".ci/run"])))
def test_scripts_parse(script):
    done = bash(["-n", script], dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert script.endswith("setup_env.sh") or Path(script).read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("script", ["pretrain_llama3_8b_8gpu.sh", "pretrain_llama3_8b_2nodes.slurm"])
def test_long_steps_have_time_to_save_before_torchrun_kills_them(script, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\necho $TORCH_ELASTIC_SHUTDOWN_TIMEOUT\n")
    launcher.chmod(0o755)
    done = bash([f"examples/{script}"], os.environ | {"LAUNCHER": str(launcher), "DATA": "d", "TOKENIZER": "t"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 300
    before_the_end = [line for line in (ROOT / "examples" / script).read_text().splitlines() if "--signal=TERM@" in line]
    for line in before_the_end:
        assert int(done.stdout) < int(line.partition("TERM@")[2].split()[0])
