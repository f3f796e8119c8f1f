"""Training in phases: what `--finetune`, `--no-load-optim` and `--ckpt-step` take from a checkpoint, and what they leave.

    first phase   2 ranks, C = 2, 128 tokens a sequence, steps 1 to 3
    second        other ranks, 256 tokens, YaRN, a schedule of its own
"""

import functools
import shutil
import sys

import pytest
import torch

from megacp.arguments import model_config_from_args, parse_args
from megacp.checkpointing.weights import SavedWeights, save_weights
from megacp.data.mock_dataset import MockDataset
from megacp.model.config import ModelConfig
from tests.distributed import RankFailure, run_distributed
from tests.reference import reference_model
from tests.test_load_hf import _output_of
from tests.test_pretrain import MODEL, _main_with_own_group, numbers, records, train

SEQUENCE = 256
FAMILIES = {"tied": [], "untied": ["--untie-embeddings-and-output-weights"]}
FIRST = [*MODEL, "--mock-data", "--global-batch-size", 2, "--train-iters", 3, "--lr-decay-iters", 40]
LONGER = ["--seq-length", SEQUENCE, "--rope-scaling-type", "yarn", "--rope-scaling-factor", 2,
          "--rope-original-max-position-embeddings", 128, "--attention-mask", "causal"]  # fmt: skip
SECOND = [*MODEL, "--mock-data", *LONGER, "--lr", 2e-3, "--lr-warmup-iters", 3, "--train-iters", 4]


@pytest.fixture(scope="module")
def first_phase(tmp_path_factory):
    """The folder of a family's first phase, with checkpoints of steps 2 and 3."""

    @functools.cache
    def folder_of(family):
        folder = tmp_path_factory.mktemp(family)
        train([*FIRST, *FAMILIES[family], "--context-parallel-size", 2, "--save", folder, "--save-interval", 2], ranks=2)
        return folder

    return folder_of


def expected_loss(saved: SavedWeights, config: ModelConfig) -> float:
    """Of the plain model in float64 on the first sequence of the mock data."""
    params = {name: saved.read(name).double() for name in saved.tensors}
    tokens = torch.from_numpy(MockDataset(config.vocab_size, SEQUENCE, 1234).tokens(0, 0, SEQUENCE + 1)).long()
    loss_sum, _ = reference_model(params, tokens[:-1], tokens[1:], torch.arange(SEQUENCE), [0, SEQUENCE], config)
    return loss_sum.item() / SEQUENCE


def config_of(flags) -> ModelConfig:
    return model_config_from_args(parse_args([str(flag) for flag in flags]))


@pytest.mark.parametrize(
    "family, ranks, layout", [("tied", 1, []), ("untied", 4, ["--context-parallel-size", 4, "--optimizer-cpu-offload"])]
)
def test_a_longer_phase_starts_at_step_0_from_the_weights_alone(first_phase, tmp_path, family, ranks, layout):
    folder, flags = first_phase(family), [*SECOND, *FAMILIES[family], *layout]
    saved = SavedWeights(folder)
    weights_alone = save_weights(tmp_path / "alone", saved.config, saved.tensors, saved.read, "the first phase").parent
    train([*flags, "--load", folder, "--finetune", "--save", tmp_path / "own", "--log-jsonl", tmp_path / "log"], ranks=ranks)
    train([*flags, "--load", weights_alone, "--log-jsonl", tmp_path / "alone.log"], ranks=ranks)

    log = records(tmp_path / "log")
    assert [(r["step"], r["lr"]) for r in log] == [
        (step, pytest.approx(lr)) for step, lr in [(1, 2e-3 / 3), (2, 4e-3 / 3), (3, 2e-3), (4, 0.0)]
    ], "the schedule begins anew"
    assert log[0]["loss"] == pytest.approx(expected_loss(saved, config_of(flags)), rel=1e-5), "so does the data"
    assert numbers(tmp_path / "log") == numbers(tmp_path / "alone.log"), "no moments came along"
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002", "iter_0000003"]

    flags += ["--train-iters", 5, "--load", tmp_path / "own", "--save", tmp_path / "own", "--log-jsonl", tmp_path / "log"]
    train(flags, ranks=ranks)
    assert [r["step"] for r in records(tmp_path / "log")] == [1, 2, 3, 4, 5], "and goes on as any run"


def test_the_same_command_starts_from_another_runs_weights_and_later_goes_on(first_phase, tmp_path):
    folder = first_phase("tied")
    finetuned = [*SECOND, "--load", folder, "--finetune", "--log-jsonl", tmp_path / "straight"]
    train(finetuned)
    command = [*SECOND, "--pretrained-checkpoint", folder, "--load", tmp_path / "own", "--save", tmp_path / "own",
               "--exit-interval", 2, "--log-jsonl", tmp_path / "log"]  # fmt: skip
    output = _output_of(command)
    assert f"loaded the weights of {folder}, step 3; this run starts at step 0 (--pretrained-checkpoint)" in output
    assert f"saved in {tmp_path / 'own'}; --load {tmp_path / 'own'} goes on from there" in output
    assert f"loaded {tmp_path / 'own'}, step 2" in _output_of(command)
    assert numbers(tmp_path / "log") == numbers(tmp_path / "straight")


def _resume_elsewhere(rank, world_size, flags, folders):
    _main_with_errors_in_files(rank, world_size, [*flags, "--load", str(folders[rank]), "--save", str(folders[rank])], folders[0].parent)


def test_ranks_that_find_different_checkpoints_do_not_train_together(first_phase, tmp_path):
    """Each host has a disk of its own, and the last run saved on one of them."""
    own = shutil.copytree(first_phase("tied"), tmp_path / "own")
    flags = [str(flag) for flag in [*FIRST, "--train-iters", 5]]
    with pytest.raises(RankFailure, match="died with exit code 1"):
        run_distributed(_resume_elsewhere, 2, flags, [tmp_path / "empty", own])
    errors = (tmp_path / "errors0").read_text()
    assert f"--load: rank 0 finds no checkpoint in {tmp_path / 'empty'}, rank 1 finds step 3 in {own}; a folder that all" in errors


def test_what_finetuning_says_and_that_it_warns_of_nothing_that_is_meant(first_phase, tmp_path):
    folder = first_phase("tied")
    output = _output_of([*SECOND, "--load", folder, "--finetune"])
    assert f"loaded the weights of {folder}, step 3; this run starts at step 0 (--finetune)" in output
    assert "the model of the checkpoint has rope_scaling None, this run has {'type': 'yarn'" in output
    assert "warning" not in output


def _draw_after_training(rank, world_size, flags):
    _main_with_own_group(rank, world_size, [str(flag) for flag in flags])
    return torch.rand(()).item()


def test_the_random_state_is_that_of_the_new_run(first_phase):
    loads = ([], ["--load", first_phase("tied"), "--finetune"], ["--load", first_phase("tied")])
    fresh, finetuned, resumed = (run_distributed(_draw_after_training, 1, [*SECOND, *load]) for load in loads)
    assert fresh == finetuned != resumed


def test_fresh_moments_at_the_step_of_the_checkpoint(first_phase, tmp_path):
    """AdamW's first step moves a weight by the learning rate, whatever its gradient."""
    folder = first_phase("tied")
    flags = [*FIRST, "--train-iters", 4, "--weight-decay", 0.0]
    moved = {}
    for name, more in (("fresh", ["--no-load-optim"]), ("old", [])):
        train([*flags, *more, "--load", folder, "--save", tmp_path / name, "--log-jsonl", tmp_path / f"{name}.log"])
        before, after = SavedWeights(folder), SavedWeights(tmp_path / name)
        change = torch.cat([(after.read(weight) - before.read(weight)).flatten() for weight in before.tensors])
        (record,) = records(tmp_path / f"{name}.log")
        moved[name] = (change.abs() / record["lr"] - 1).abs()
        assert record["step"] == 4 and record["loss"] == pytest.approx(records(tmp_path / "fresh.log")[0]["loss"])
    assert moved["fresh"].median() < 1e-3 < moved["old"].median()


def test_an_older_checkpoint(first_phase, tmp_path):
    folder = first_phase("tied")
    flags = [*FIRST, "--context-parallel-size", 2]
    train([*flags, "--log-jsonl", tmp_path / "straight"], ranks=2)
    train([*flags, "--load", folder, "--ckpt-step", 2, "--log-jsonl", tmp_path / "again"], ranks=2)
    assert numbers(tmp_path / "again") == numbers(tmp_path / "straight")[2:]

    train([*flags, "--load", folder, "--ckpt-step", 2, "--log-jsonl", tmp_path / "straight"], ranks=2)
    assert len(numbers(tmp_path / "straight.1")) == 3, "the log of the run that it branches off is kept"

    copy = shutil.copytree(folder, tmp_path / "copy")
    output = _output_of([*FIRST, "--load", copy, "--save", copy, "--ckpt-step", 2, "--exit-interval", 3, "--train-iters", 4])
    assert "warning: later checkpoints are left behind (step 3); --ckpt-keep 2 deletes them before others as this run saves" in output
    assert f"saved in {copy}; --load {copy} without --ckpt-step goes on from there" in output

    copy = shutil.copytree(folder, tmp_path / "kept")
    _output_of([*FIRST, "--load", copy, "--save", copy, "--ckpt-step", 2, "--train-iters", 4])
    assert sorted(path.name for path in copy.glob("iter_*")) == ["iter_0000002", "iter_0000004"], "step 3 was left behind"

    copy = shutil.copytree(folder, tmp_path / "again_saved")
    _output_of([*FIRST, "--load", copy, "--save", copy, "--ckpt-step", 2, "--train-iters", 4, "--save-interval", 1])
    assert sorted(path.name for path in copy.glob("iter_*")) == ["iter_0000003", "iter_0000004"], "this step 3 is its own"


def _main_with_errors_in_files(rank, world_size, flags, folder):
    sys.stderr = (folder / f"errors{rank}").open("w")
    _main_with_own_group(rank, world_size, flags)


OTHER_MODELS = {
    "--hidden-size": (["--hidden-size", 64], "weight is (258, 32) in the checkpoint and (258, 64) in the model"),
    "--ffn-hidden-size": (["--ffn-hidden-size", 64], "layers.0.gate_proj is (48, 32) in the checkpoint and (64, 32) in the model"),
    "--num-layers": (["--num-layers", 3], "layers.2.input_layernorm (32,) is not in the checkpoint"),
    "--num-query-groups": (["--num-query-groups", 4], "layers.0.k_proj is (16, 32) in the checkpoint and (32, 32) in the model"),
    "--qk-layernorm": (["--qk-layernorm"], "layers.0.q_norm (8,) is not in the checkpoint"),
    "--num-attention-heads": (  # as many weights of the same shapes, which mean something else
        ["--num-attention-heads", 8, "--num-query-groups", 4, "--kv-channels", 4],
        "of a model with --num-attention-heads 4; --num-attention-heads 8 does not fit it",
    ),
    "--untie-embeddings-and-output-weights": (["--untie-embeddings-and-output-weights"], "lm_head (258, 32) is not in"),
}  # fmt: skip


@pytest.mark.parametrize("flag, ranks", [(flag, 1) for flag in OTHER_MODELS] + [("--hidden-size", 2)])
def test_a_model_of_other_shapes_is_refused_by_the_flag(first_phase, tmp_path, flag, ranks):
    folder = first_phase("tied")
    changes, what = OTHER_MODELS[flag]
    flags = [*SECOND, *changes, "--load", folder, "--finetune", "--save", tmp_path / "own"]
    with pytest.raises(RankFailure, match="died with exit code 1"):
        run_distributed(_main_with_errors_in_files, ranks, [str(part) for part in flags], tmp_path)
    errors = "".join((tmp_path / f"errors{rank}").read_text() for rank in range(ranks))
    assert f"--load {folder}" in errors and what in errors and flag in errors and "Traceback" not in errors
    assert not list((tmp_path / "own").glob("iter_*"))
