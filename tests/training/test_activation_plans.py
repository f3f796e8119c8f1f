"""Budgets of host and disk memory are kept, or refused before anything is allocated, with advice that works."""

import copy
import re

import pytest
import torch

from megacp.argument_checks import ArgumentError
from megacp.arguments import model_config_from_args, parse_args, validate_args
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.parallel_state import ParallelLayout
from megacp.training.activation_plans import activation_plans, check_budgets, device_limit, memory_job, stages_note
from megacp.training.capacity import parse_planned

LAYERS = 32
# u is 1 GiB a rank; the log-sum-exp of a layer is a 64th of that.
FLAGS = "--mock-data --model llama3-8b --seq-length 1048576 --context-parallel-size 8".split()


def check(args):
    validate_args(args, 8)
    config, layout = model_config_from_args(args), ParallelLayout(8, 8)
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, 8, args.upipe_heads_per_stage)
    job = memory_job(args, config, layout, schedule, torch.bfloat16)
    plans = activation_plans(args, job, torch.device("cpu"))
    check_budgets(args, plans, job)
    return job, plans


def refused(flags):
    args = parse_args([*FLAGS, *flags.split()])
    with pytest.raises(ArgumentError) as error:
        check(args)
    return args, error.value


# Host: h, output and lse of 32 layers; disk: h and output, with the lse and 256 MiB of staging and a chunk of 2 MiB on the host.
ENOUGH = {
    "--activation-memory host": ("host", LAYERS * (2 + 1 / 64)),
    "--activation-memory lean": ("host", LAYERS * (2 + 1 / 64) + 1),
    "--activation-memory host --recompute-granularity full": ("host", LAYERS),
    "--activation-memory disk --disk-offload-dir /tmp": ("disk", LAYERS * 2),
    "--activation-memory disk --disk-offload-dir /tmp --recompute-granularity full": ("disk", LAYERS),
    "--disk-offload-dir /tmp --activation-memory disk": ("host", LAYERS / 64 + 0.25 + 2 / 1024),
}


@pytest.mark.parametrize("flags", ENOUGH)
def test_a_budget_that_holds_the_activations_to_the_byte_is_enough_and_a_smaller_one_is_not(flags):
    place, gib = ENOUGH[flags]
    check(parse_args([*FLAGS, *flags.split(), f"--{place}-memory-gib", repr(gib)]))
    _, error = refused(f"{flags} --{place}-memory-gib {gib - 1e-6!r}")
    assert str(error).startswith(f"--{place}-memory-gib {gib - 1e-6:g} is less than the ")


@pytest.mark.parametrize(
    "flags",
    [
        "--activation-memory host --host-memory-gib 64",
        "--activation-memory lean --host-memory-gib 33",
        "--activation-memory lean --host-memory-gib 1 --disk-offload-dir /tmp",
        "--activation-memory disk --disk-offload-dir /tmp --disk-memory-gib 40",
        "--activation-memory disk --disk-offload-dir /tmp --disk-memory-gib 80 --host-memory-gib 0.2",
    ],
)
def test_every_alternative_of_the_advice_fits(flags):
    args, error = refused(flags)
    assert len(error.fixes) >= 2
    for fix in error.fixes:
        fixed = copy.deepcopy(args)
        for name, value in fix.items():
            assert f"--{name.replace('_', '-')} {value}" in str(error)
            setattr(fixed, name, value)
        check(fixed)


def test_the_advice_names_the_disk_only_where_there_is_one():
    _, error = refused("--activation-memory host --host-memory-gib 1")
    assert "--activation-memory disk" not in str(error) and "--activation-memory gpu" in str(error)
    _, error = refused("--activation-memory host --host-memory-gib 1 --disk-offload-dir /tmp")
    assert "--activation-memory disk" in str(error)


def test_states_on_the_host_count_against_its_budget():
    flags = "--optimizer-cpu-offload --activation-memory host"
    job, _ = check(parse_args([*FLAGS, *flags.split()]))
    enough = LAYERS * (2 + 1 / 64) + job.host_state_bytes / 2**30
    check(parse_args([*FLAGS, *flags.split(), "--host-memory-gib", repr(enough)]))
    _, error = refused(f"{flags} --host-memory-gib {enough - 1e-6!r}")
    assert "one rank's activations and states take on the host" in str(error)
    assert f"--optimizer-cpu-offload ({job.host_state_bytes / 2**30:.2f} GiB of states)" in str(error)
    (own, *_) = error.fixes
    assert own == {"host_memory_gib": pytest.approx(enough, abs=0.011)} and own["host_memory_gib"] >= enough


@pytest.mark.parametrize(
    "flags, gib",
    [("--gpu-memory-limit-gib 40", 36), ("--gpu-memory-gib 38", 38), ("--gpu-memory-gib 38 --gpu-memory-limit-gib 40", 38)],
)
def test_a_plan_leaves_room_below_a_limit_unless_it_has_a_budget_of_its_own(flags, gib):
    args = parse_args([*FLAGS, *flags.split()])
    assert device_limit(args, torch.device("cpu")) == int(gib * 2**30)
    assert parse_planned([*FLAGS, *flags.split()], "").gpu_memory_gib == pytest.approx(gib)


@pytest.mark.parametrize(
    "flags, more, less",
    [
        ("--gpu-memory-gib 1", ["a larger --gpu-memory-gib than 1", "--upipe-query-chunk 8192"], ["--host-memory-gib", "--disk"]),
        ("--gpu-memory-gib 1 --upipe-query-chunk 8192", ["a smaller --mlp-tile-size"], ["--upipe-query-chunk"]),
        ("--gpu-memory-limit-gib 1 --mlp-tile-size 262144",
         ["--gpu-memory-limit-gib than 1", "a smaller --mlp"], ["--upipe-query"]),
        ("--gpu-memory-gib 60 --host-memory-gib 1",
         ["--host-memory-gib", "--disk-offload-dir DIR", "granularity full"], ["--upipe"]),
        ("--gpu-memory-gib 60 --host-memory-gib 1 --recompute-granularity full --disk-offload-dir /tmp --disk-memory-gib 1",
         ["a larger --disk-memory-gib"], ["granularity full", "DIR"]),
    ],
)  # fmt: skip
def test_auto_without_a_plan_advises_only_what_changes_something(flags, more, less):
    _, error = refused(flags)
    advice = str(error).split("; ")[-1]
    assert all(part in advice for part in more) and not any(part in advice for part in less), str(error)


@pytest.mark.parametrize("memory", ["host", "lean"])
def test_nothing_can_be_recomputed_only_where_everything_stays_on_the_gpu(memory):
    with pytest.raises(ArgumentError, match=f"--recompute-granularity none .*--activation-memory {memory}.*--recompute-granularity selective"):
        validate_args(parse_args([*FLAGS, "--recompute-granularity", "none", "--activation-memory", memory]), 8)


def test_nothing_recomputed_fits_or_says_what_does():
    args, error = refused("--recompute-granularity none --gpu-memory-gib 70")
    assert "selective works" in str(error)
    check(parse_args([*FLAGS, "--recompute-granularity", "selective", "--gpu-memory-gib", "70"]))
    needed = float(re.search(r"([\d.]+) GiB on a rank", str(error))[1])
    check(parse_args([*FLAGS, "--recompute-granularity", "none", "--gpu-memory-gib", str(needed + 0.01)]))


@pytest.mark.parametrize("flags,said", [
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144 --mlp-tile-size 8192 --gpu-memory-gib 125",
     "stages of 8 heads of 64 .* a2a, take 29.1"),
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144 --upipe-heads-per-stage 2 --gpu-memory-gib 125",
     "stages of 2 heads of 64 .* a2a, take 29.1"),
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144 --gpu-memory-gib 125", None),  # tiles are large
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144 --upipe-heads-per-stage 2 --gpu-memory-gib 27.5",
     None),  # all heads do not fit
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144 --cp-comm-type a2a --gpu-memory-gib 125", None),
    ("--model llama3-8b --context-parallel-size 2 --seq-length 131072 --gpu-memory-gib 125", None),  # kernels are large
    ("--model llama3.2-1b --context-parallel-size 2 --seq-length 262144", None),  # a CPU
])  # fmt: skip
def test_small_stages_that_memory_does_not_ask_for_are_told(flags, said):
    args, device = parse_args(["--mock-data", *flags.split()]), torch.device("cpu")
    validate_args(args, 2)
    config, layout = model_config_from_args(args), ParallelLayout(2, 2)
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, 2, args.upipe_heads_per_stage)
    job = memory_job(args, config, layout, schedule, torch.bfloat16)
    note = stages_note(args, job, activation_plans(args, job, device), device)
    assert note is None if said is None else re.search(said, note)
