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


MEASURING = """#!/usr/bin/env bash
echo "$@" >> "{folder}/asked"
words=" $* "
value() {{ rest=${{words#* $1 }}; echo "${{rest%% *}}"; }}
case $words in
  *device_count*) echo 2 ;;
  *longest_seq_length*) cat > /dev/null; echo "$GUESSED" ;;
  *"$FAILING"*) echo "error: it failed" >&2; exit 3 ;;
  *" --rehearse-attention stub "*)
    [ "$(value --seq-length)" -le "$FITTING" ] || {{ echo "error: out of GPU memory: …" >&2; exit 1; }}
    echo "most  41.000" ;;
  *--rehearse-json*) echo {{}} > "$(value --rehearse-json)" ;;
  *--log-jsonl*)
    echo {{}} > "$(value --log-jsonl)"
    mkdir -p "$(value --profile-dir)"
    touch "$(value --profile-dir)/rank0.json.gz" ;;
  *trace_summary*) echo "a trace" ;;
  *--measured*) echo "a comparison" ;;
esac
"""


@pytest.fixture
def measuring(tmp_path):
    """Variables for a stand-in that trains and rehearses in no time, and what it was asked."""
    python = tmp_path / "python"
    python.write_text(MEASURING.format(folder=tmp_path))
    python.chmod(0o755)
    unset = {name: value for name, value in os.environ.items() if name not in ("MODEL", "STEPS", "LIMIT_GIB", "GUESS")}
    return unset | {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "FAILING": "nothing"}, tmp_path / "asked"


def test_gpus_are_measured_part_by_part_and_one_that_fails_keeps_none_from_running(measuring):
    variables, log = measuring
    script = ["examples/measure_gpus.sh", "--data-path", "text"]
    failing = "1024 --cp-comm-type a2a --data-path text --train-iters 5 --log"
    done = bash(script, variables | {"LENGTHS": "1024 2048", "FAILING": failing})
    assert done.returncode == 1 and done.stderr == ""
    rows = {line.split()[0]: line for line in done.stdout.split("part ")[-1].splitlines() if line.startswith("llama")}
    assert "failed, exit code 3" in rows["llama3.2-1b-1024-a2a"] and "llama3.2-1b-1024-a2a.compared" not in rows
    assert sum("done" in row for row in rows.values()) == 5 * 4 + 1, rows  # the rehearsal of the one that failed
    assert done.stdout.count("a comparison") == 5 and done.stdout.count("a trace") == 5 and "error: it failed" in done.stdout
    trained = [line for line in log.read_text().splitlines() if "--log-jsonl" in line and "pretrain_llama" in line]
    assert len(trained) == 6 and all("--nproc-per-node 2 " in line and "--mock-data" not in line for line in trained)
    assert bash(script, variables | {"LENGTHS": "1024"}).returncode == 0
    none_left = bash(script, variables | {"LENGTHS": "1024", "TIME_LIMIT_S": "40"})
    assert none_left.returncode == 1 and "not run: no time" in none_left.stdout


@pytest.mark.parametrize("guess", [8, 64, 65, 66, 200])
def test_the_longest_context_is_found_from_any_guess(measuring, guess):
    variables, _ = measuring
    numbers = {"STEP": "8192", "FITTING": str(65 * 8192 + 1), "GUESSED": str(guess * 8192 + 5)}
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "longest"], variables | numbers)
    assert done.returncode == 0, done.stderr
    assert f"GPUs of 74.5 GiB: {65 * 8192} tokens; {66 * 8192} do not fit" in done.stdout


def test_a_search_that_meets_other_trouble_says_so(measuring):
    variables, _ = measuring
    numbers = {"STEP": "8192", "FITTING": "0", "GUESSED": "40960"}
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "longest"], variables | numbers)
    assert done.returncode == 1 and "not even 8192 tokens fit" in done.stdout
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "longest"], variables | numbers | {"FAILING": "--rehearse-attention stub"})
    assert done.returncode == 1 and "40960 tokens: exit code 3, neither fitting nor too large" in done.stderr


def test_stages_are_one_command_each(measuring):
    variables, log = measuring
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "128k", "5m", "stub"], variables | {"FITTING": "5242880"})
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [line for line in log.read_text().splitlines() if "pretrain_llama" in line]
    assert len(asked) == 7 and all("--gpu-memory-limit-gib 74.5" in line and "llama3-8b" in line for line in asked)
    assert "--seq-length 5242880" in asked[-1] and "--rehearse-attention stub" in asked[-1] and "--num-layers 1 " in asked[-2]
    assert bash(["examples/llama3_8b_8gpu_5m.sh", "6m"], variables).returncode == 2
