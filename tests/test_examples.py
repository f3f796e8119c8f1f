"""The scripts that install and launch, with a stand-in for the environment's Python that writes down what it is asked to do."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
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
    assert training.endswith("--train-iters 6") and "--lr-warmup-iters" not in training, "as few steps as one likes"
    log.unlink()
    assert bash(["examples/quickstart.sh"], variables | {"NPROC": "2"}).returncode == 0
    assert "--train-iters 40 " in log.read_text() and "--lr-warmup-iters 5 " in log.read_text()


@pytest.mark.parametrize("script", sorted(map(str, [*ROOT.glob("examples/*.s*"), ROOT / "tests/run.sh", ROOT / ".ci/run"])))
def test_scripts_parse(script):
    done = bash(["-n", script], dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert script.endswith(("setup_env.sh", "measuring.sh")) or Path(script).read_text().startswith("#!/usr/bin/env bash\n")


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
  *device_count*) echo "$GPUS" llama3.2-1b:16:32:8 llama3-8b:32:32:8 llama-tiny:4:8:4 ;;
  *"$FAILING"*) echo "error: it failed" >&2; exit 3 ;;
  *"$HANGING"*) setsid sh -c "trap '$ON_TERM' TERM; echo \\$\\$ >> {folder}/hanging; while :; do sleep 0.2; done" & wait ;;
  *" --rehearse-attention stub "*)
    [ "$(value --seq-length)" -le "$FITTING" ] || {{ echo "error: out of GPU memory: …" >&2; exit 1; }}
    echo "elsewhere  327.500 GiB of host memory, 0.000 GiB of disk for activations"
    echo "most  41.000"
    case $words in *"$LINGERING"*) sleep 60 ;; esac ;;
  *" --longest "*" --json "*) echo '  "longest_seq_length": '"$GUESSED", ;;
  *--rehearse-json*) echo '  "device": "'"$REHEARSED_ON"'",' > "$(value --rehearse-json)" ;;
  *measure_all_to_all*) echo '"gpus": '"$(value --nproc-per-node)" > "$(value --output)" ;;
  *--log-jsonl*)
    seq "$(value --train-iters)" > "$(value --log-jsonl)"
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
    own = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "GPUS": "2", "REHEARSED_ON": "a GPU"}
    return unset | own | {"FAILING": "nothing", "HANGING": "nothing", "LINGERING": "nothing", "ON_TERM": ""}, tmp_path / "asked"


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
    assert bash(script, variables | {"LENGTHS": "1024", "OUT": f"{variables['OUT']}/it-failed"}).returncode == 0
    none_left = bash(script, variables | {"LENGTHS": "1024", "TIME_LIMIT_S": "40"})
    assert none_left.returncode == 1 and "not run: no time" in none_left.stdout


REFUSED = [
    ({"OUT": "/proc/none"}, [], "OUT=/tmp/"),
    ({"NPROC": "0"}, [], "NPROC=8 works"),
    ({"NPROC": "3"}, [], "NPROC=2 works"),
    ({"NPROC": "1", "MODEL": "llama-tiny"}, [], "LINKS="),
    ({"MODEL": "llama4"}, [], "MODEL=llama3.2-1b or llama3-8b or llama-tiny works"),
    ({"LENGTHS": "abc"}, [], "LENGTHS=262144 works"),
    ({"LENGTHS": " "}, [], "LENGTHS=262144 works"),
    ({"LENGTHS": "4096 4097"}, [], "LENGTHS=4098 works"),
    ({"METHODS": " "}, [], "METHODS="),
    ({"METHODS": "upipe ring"}, [], "METHODS: ring"),
    ({"METHODS": "upipe-3"}, [], "METHODS=upipe-2 works"),
    ({"METHODS": "upipe-6", "MODEL": "llama-tiny"}, [], "upipe-6 does not divide the 8 heads of llama-tiny; METHODS=upipe-2 works"),
    ({"NPROC": "16", "MODEL": "llama-tiny", "LENGTHS": "4096"}, ["--device", "cpu"], "NPROC=8 works"),
    ({"PREFETCH": "2"}, [], 'PREFETCH="0 1" works'),
    ({"STEPS": "abc"}, [], "STEPS=5 works"),
    ({"STEPS": "0"}, [], "STEPS=5 works"),
    ({"REHEARSED_STEPS": "-1"}, [], "REHEARSED_STEPS=3 works"),
    ({"LINKS": "1T"}, [], "LINKS="),
    ({"PART_LIMIT_S": "12.5"}, [], "PART_LIMIT_S=150 works"),
    ({"PART_LIMIT_S": "0"}, [], "PART_LIMIT_S=150 works"),
    ({"TIME_LIMIT_S": "1h"}, [], "TIME_LIMIT_S=1800 works"),
    ({}, ["--seq-length", "4096"], "LENGTHS=262144 works"),
    ({}, ["--cp-comm-type=a2a"], "METHODS="),
    ({}, ["--upipe-heads-per-stage", "4"], "METHODS="),
    ({}, ["--upipe-prefetch", "1"], "PREFETCH="),
    ({}, ["--model", "llama3-8b"], "MODEL=llama3-8b works"),
    ({}, ["--context-parallel-size", "2"], "NPROC=8 works"),
    ({}, ["--lr", "1e-4", "--train-iters", "2"], "STEPS=5 works"),
    ({}, ["--log-jsonl", "x"], "OUT=runs/measure-gpus works"),
    ({}, ["--profile"], "--profile: "),
    ({}, ["--profile-ranks", "0", "1"], "--profile-ranks: "),
    ({}, ["--rehearse-world-size", "4"], "REHEARSED_STEPS=3 works"),
    ({}, ["--save", "x"], "--save: "),
    ({}, ["--load=x"], "--load: "),
]


@pytest.mark.parametrize("given, flags, said", REFUSED, ids=[" ".join([*map("=".join, row[0].items()), *row[1]]) for row in REFUSED])
def test_what_cannot_be_measured_is_refused_before_anything_runs(measuring, given, flags, said):
    variables, log = measuring
    done = bash(["examples/measure_gpus.sh", *flags], variables | given)
    assert done.returncode == 2 and said in done.stderr and done.stdout == "", done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert not log.exists() or [line for line in log.read_text().splitlines() if "device_count" not in line] == []


@pytest.mark.parametrize("script", ["measure_gpus.sh", "llama3_8b_8gpu_5m.sh"])
def test_help_is_the_head_of_the_script(script):
    done = bash([f"examples/{script}", "--help"], {})
    assert done.returncode == 0 and f"bash examples/{script}" in done.stdout and "NPROC=" in done.stdout and "set -" not in done.stdout


STUB = "--rehearse-attention stub"
SMALL = {"LENGTHS": "1024", "METHODS": "a2a", "LINKS": ""}


def test_places_are_those_of_the_callers_folder_and_a_further_run_adds_to_them(measuring, tmp_path):
    variables, log = measuring
    script = [f"{ROOT}/examples/measure_gpus.sh", "--data-path", "text"]
    assert bash(script, variables | SMALL | {"OUT": "folder"}, cwd=tmp_path).returncode == 0
    assert bash(script, variables | SMALL | {"OUT": "folder", "LENGTHS": "2048"}, cwd=tmp_path).returncode == 0
    out = tmp_path / "folder"
    assert (out / "summary.txt").read_text().count("LENGTHS=") == 2
    assert (out / "comparison.txt").read_text().count("a comparison") == 2
    (trained, _) = [line for line in log.read_text().splitlines() if "--log-jsonl" in line and "--nproc-per-node" in line]
    assert f"{ROOT}/pretrain_llama.py" in trained and f"--log-jsonl {out}/" in trained


def test_links_correct_a_prediction_when_they_are_of_these_ranks_and_gpus(measuring, tmp_path):
    variables, log = measuring

    def calibrated(**more):
        log.unlink(missing_ok=True)
        bash(["examples/measure_gpus.sh"], variables | SMALL | more)
        (asked,) = [line for line in log.read_text().splitlines() if "--measured" in line]
        return "--calibrate" in asked

    assert calibrated(LINKS="1M")
    assert calibrated(), "links of an earlier run"
    assert not calibrated(REHEARSED_ON="cpu")
    assert not calibrated(NPROC="1"), "links of two ranks"
    assert not calibrated(LINKS="1M", FAILING="measure_all_to_all") and not (tmp_path / "out/all_to_all.json").exists()


def test_messages_of_all_tools_are_shown(measuring):
    variables, _ = measuring
    python = Path(variables["PYTHON"])
    python.write_text(python.read_text().replace("error: it failed", "plan_memory: it failed"))
    done = bash(["examples/measure_gpus.sh"], variables | SMALL | {"FAILING": "--measured"})
    assert done.returncode == 1 and "plan_memory: it failed" in done.stdout


def started(script, variables, log):
    """The running script, once one of its commands hangs."""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it, and that is inherited
    process = subprocess.Popen(["bash", *script], cwd=ROOT, env=variables, preexec_fn=heard, **told)
    deadline = time.monotonic() + 30
    while not log.with_name("hanging").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.terminate()
        time.sleep(0.05)
    return process


def alive(log):
    """Of the commands that hang. One that has ended may still wait for a parent to take note: a Z."""
    processes = [Path("/proc", number, "stat") for number in log.with_name("hanging").read_text().split()]
    return [str(process) for process in processes if process.exists() and ") Z " not in process.read_text()]


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_that_runs_and_what_is_done_is_told(measuring, sent, code):
    variables, log = measuring
    variables |= SMALL | {"HANGING": "--rehearse-json"}
    process = started(["examples/measure_gpus.sh"], variables, log)
    second = bash(["examples/measure_gpus.sh"], variables)
    assert second.returncode == 2 and f"is in use by a run (process {process.pid})" in second.stderr
    process.send_signal(sent)
    told, _ = process.communicate(timeout=20)
    assert process.returncode == code and alive(log) == []
    rows = told.rpartition("part ")[2]
    assert "1024-a2a.trace " in rows and "stopped" in rows, told
    assert bash(["examples/measure_gpus.sh"], variables | {"HANGING": "nothing"}).returncode == 0


def test_a_part_that_is_out_of_time_leaves_nothing_running(measuring):
    variables, log = measuring
    done = bash(["examples/measure_gpus.sh"], variables | SMALL | {"HANGING": "--rehearse-json", "PART_LIMIT_S": "1"})
    assert done.returncode == 1 and "out of time" in done.stdout and alive(log) == []


@pytest.mark.parametrize("guess", [8, 64, 65, 66, 200])
def test_the_longest_context_is_found_from_any_guess(measuring, guess):
    variables, _ = measuring
    numbers = {"STEP": "8192", "FITTING": str(65 * 8192 + 1), "GUESSED": str(guess * 8192 + 5)}
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "longest"], variables | numbers)
    assert done.returncode == 0, done.stderr
    assert f"GPUs of 74.5 GiB: {65 * 8192} tokens; {66 * 8192} do not fit" in done.stdout


LONGEST = ["examples/llama3_8b_8gpu_5m.sh", "longest"]
PREDICTING = "--gpu-memory-gib 74.5 --json"


def test_a_search_that_meets_other_trouble_says_so(measuring):
    variables, _ = measuring
    numbers = {"STEP": "8192", "FITTING": "0", "GUESSED": "40960"}
    done = bash(LONGEST, variables | numbers)
    assert done.returncode == 1 and "8192 tokens do not fit\nnot even 8192 tokens fit" in done.stdout
    done = bash(LONGEST, variables | numbers | {"FAILING": STUB})
    assert done.returncode == 1 and "40960 tokens: exit code 3, neither fitting nor too large" in done.stderr
    assert "not even" not in done.stdout


@pytest.mark.parametrize("given", [{"GUESS": "1024"}, {"GUESSED": "100"}, {"FAILING": PREDICTING, "LONG": "40960"}])
def test_a_search_tries_before_it_says_that_nothing_fits(measuring, tmp_path, given):
    variables, _ = measuring
    done = bash(LONGEST, variables | {"STEP": "8192", "FITTING": "30000", "GUESSED": "8192"} | given)
    assert done.returncode == 0 and "24576 tokens; 32768 do not fit" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("24576 tokens keep 327.500 GiB in host memory for a rank, 2620.0 GiB for 8 ")
    assert ("error: it failed" in done.stderr) == ("FAILING" in given)
    for line in (tmp_path / "out/longest.txt").read_text().splitlines():
        assert " llama3-8b, 8 GPUs of 74.5 GiB, --activation-memory lean, " in line and line[:2] == "20", line


def test_a_search_that_is_out_of_time_says_what_it_knows_and_how_to_go_on(measuring):
    variables, log = measuring
    limited = variables | {"STEP": "8192", "FITTING": "30000", "GUESS": "8192", "TIME_LIMIT_S": "2"}
    done = bash(LONGEST, limited | {"HANGING": "--seq-length 16384"})
    assert done.returncode == 1 and "at 16384 tokens: so far 8192 tokens fit, none is known not to; GUESS=16384 goes" in done.stdout
    assert "on from here, or TIME_LIMIT_S=560 goes further at once" in done.stdout and alive(log) == []
    done = bash(LONGEST, limited | {"LINGERING": "--seq-length 16384"})
    assert "16384 tokens fit" in done.stdout and "so far 16384 tokens fit" in done.stdout, done.stdout
    done = bash([LONGEST[0], "stub"], limited | {"HANGING": STUB, "ON_TERM": "exit"})
    assert done.returncode == 1 and "not done in TIME_LIMIT_S=2; TIME_LIMIT_S=560" in done.stdout


def test_a_stage_without_time_for_its_steps_names_a_time(measuring):
    variables, _ = measuring
    done = bash([LONGEST[0], "128k"], variables | {"GPUS": "8", "METHODS": "a2a", "TIME_LIMIT_S": "40"})
    assert done.returncode == 1 and "TIME_LIMIT_S=40 kept 3 parts from" in done.stdout, done.stdout
    named = int(done.stdout.partition("of their own; TIME_LIMIT_S=")[2].split()[0])
    assert 3 * 150 + 40 <= named <= 3 * 150 + 60


def test_host_memory_that_a_context_needs_is_told(measuring):
    variables, _ = measuring
    tiny = {"PYTHON": sys.executable, "MODEL": "llama-tiny", "NPROC": "2", "LONG": "4096", "LIMIT_GIB": "1", "HOST_GIB": "0.01"}
    done = bash([LONGEST[0], "plan", "stub"], variables | tiny | {"DEVICE": "cpu", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"([0-9]+) tokens keep ([0-9.]+) GiB in host memory for a rank, ([0-9.]+) GiB for 2 ranks", done.stdout)
    (planned, longest, rehearsed) = [(int(tokens), float(rank), float(node)) for tokens, rank, node in told]
    assert planned[0] == rehearsed[0] == 4096 < longest[0] and 0 < planned[1] < longest[1]
    assert planned[1] == pytest.approx(rehearsed[1], abs=0.006) and longest[2] == pytest.approx(2 * longest[1], abs=0.06)
    assert done.stdout.count("HOST_GIB=0.01 does not count here") == 3


def test_stages_are_one_command_each(measuring):
    variables, log = measuring
    done = bash(["examples/llama3_8b_8gpu_5m.sh", "128k", "5m", "stub"], variables | {"FITTING": "5242880", "GPUS": "8"})
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [line for line in log.read_text().splitlines() if "pretrain_llama" in line]
    assert len(asked) == 7 and all("--gpu-memory-limit-gib 74.5" in line and "llama3-8b" in line for line in asked)
    assert "--seq-length 5242880" in asked[-1] and "--rehearse-attention stub --rehearse-layers 2 " in asked[-1]
    assert "--num-layers 1 " in asked[-2]


@pytest.mark.parametrize(
    "given, stages, said",
    [
        ({}, ["plan", "6m"], "6m is not a stage"),
        ({}, ["plan", "128k"], "NPROC=2 works"),
        ({"NPROC": "0"}, ["plan"], "NPROC=8 works"),
        ({"MODEL": "llama4"}, ["plan"], "MODEL=llama3.2-1b or"),
        ({"LIMIT_GIB": "0"}, ["stub"], "LIMIT_GIB=74.5 works"),
        ({"HOST_GIB": "64G"}, ["stub"], "HOST_GIB=64 works"),
        ({"STEP": "1001"}, ["longest"], "STEP=1008 works"),
        ({"NPROC": "3"}, ["stub"], "NPROC=2 works"),
        ({"NPROC": "16", "MODEL": "llama-tiny"}, ["stub"], "NPROC=8 works"),
        ({"COMPUTED": "33"}, ["stub"], "COMPUTED=32 works"),
        ({"LONG": "5M"}, ["stub"], "LONG=5242880 works"),
        ({"GUESS": "x"}, ["longest"], "GUESS=5242880 works"),
        ({"METHODS": "ring"}, ["stub", "128k"], "METHODS="),
        ({"TIME_LIMIT_S": "9m"}, ["stub"], "TIME_LIMIT_S=560 works"),
        ({"DEVICE": "tpu"}, ["stub"], "DEVICE=auto works"),
        ({"OUT": "/proc/none"}, ["stub"], "OUT=/tmp/"),
    ],
)
def test_stages_that_cannot_run_are_refused_before_any_does(measuring, given, stages, said):
    variables, log = measuring
    done = bash(["examples/llama3_8b_8gpu_5m.sh", *stages], variables | given)
    assert done.returncode == 2 and said in done.stderr and done.stdout == "", done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert not log.exists() or [line for line in log.read_text().splitlines() if "device_count" not in line] == []


@pytest.mark.parametrize(
    "stage, hanging", [("128k", "--rehearse-json"), ("stub", STUB), ("longest", STUB), ("longest", PREDICTING)]
)
def test_a_signal_ends_a_stage_and_all_below_it(measuring, stage, hanging):
    variables, log = measuring
    guess = "524288" if hanging == STUB else ""
    variables |= {"GPUS": "8", "METHODS": "a2a", "HANGING": hanging, "GUESS": guess, "ON_TERM": "exit"}
    process = started(["examples/llama3_8b_8gpu_5m.sh", "plan", stage], variables, log)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and alive(log) == [] and f"stages done: plan; stopped: {stage}" in told, told
    assert "Error" not in told and "do not fit" not in told and "not even" not in told, told


def test_what_a_killed_run_has_left_is_named(measuring):
    variables, log = measuring
    variables |= {"HANGING": STUB, "ON_TERM": "exit"}
    process = started(["examples/llama3_8b_8gpu_5m.sh", "stub"], variables, log)
    process.kill()
    process.wait()
    left = log.with_name("hanging").read_text().split()
    second = bash(["examples/llama3_8b_8gpu_5m.sh", "stub"], variables)
    named = second.stderr.partition("kill ")[2].partition(" works")[0].split()
    assert second.returncode == 2 and f"a killed run (process {process.pid})" in second.stderr and set(left) <= set(named)
    subprocess.run(["kill", *named])  # a sleep of theirs may have ended
    process.communicate(timeout=10)
    assert bash(["examples/llama3_8b_8gpu_5m.sh", "stub"], variables | {"HANGING": "nothing", "FITTING": "5242880"}).returncode == 0
