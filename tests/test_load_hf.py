"""`--load-hf`: a run that starts from a Hugging Face folder, whose config.json is the model."""

import contextlib
import io
import json

import pytest
import torch

from megacp.argument_checks import FIXED_BY_WEIGHTS, ArgumentError
from megacp.arguments import model_config_from_args, parse_args, validate_args
from megacp.checkpointing.huggingface_config import model_config
from megacp.data.mock_dataset import MockDataset
from megacp.kernels.rotary import RopeScaling
from tests.checkpointing.pretrained_models import MODELS, VOCABULARY, save_model
from tests.distributed import run_distributed
from tests.test_pretrain import _main_with_own_group, records, run, train
from tools.convert_checkpoint import main as convert

SEQUENCE = 256
FLAGS = f"--mock-data --attention-mask causal --seq-length {SEQUENCE} --device cpu --fp32 --lr 1e-3 --lr-decay-iters 9".split()


def _loss_of_transformers(model):
    """Of the first sequence of the mock data."""
    tokens_S = torch.from_numpy(MockDataset(VOCABULARY, SEQUENCE, 1234).tokens(0, 0, SEQUENCE + 1))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(tokens_S[None, :-1]).logits[0], tokens_S[1:]).item()


def _output_of(flags):
    (output,) = run_distributed(_main_with_its_output, 1, [str(flag) for flag in flags])
    return output


def _main_with_its_output(rank, world_size, flags):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        _main_with_own_group(rank, world_size, flags)
    return output.getvalue()


def test_a_run_starts_from_the_folder_and_goes_on_from_its_own_checkpoint(tmp_path):
    model = save_model(tmp_path / "hf", *MODELS["qwen3, yarn, tied"], max_shard_size="50KB")
    flags = [
        *FLAGS,
        "--load-hf",
        tmp_path / "hf",
        "--save",
        tmp_path / "run",
        "--load",
        tmp_path / "run",
        "--context-parallel-size",
        2,
    ]
    train([*flags, "--train-iters", 2, "--log-jsonl", tmp_path / "log"], ranks=2)
    assert records(tmp_path / "log")[0]["loss"] == pytest.approx(_loss_of_transformers(model), rel=1e-5)
    for path in (tmp_path / "hf").glob("*.safetensors"):
        path.unlink()  # the run has weights of its own now
    train([*flags, "--train-iters", 3, "--log-jsonl", tmp_path / "log"], ranks=2)
    assert [record["step"] for record in records(tmp_path / "log")] == [1, 2, 3]


def test_weights_go_straight_to_the_host_when_the_optimizer_is_there(tmp_path):
    model = save_model(tmp_path / "hf", *MODELS["qwen3, yarn, tied"])
    train([*FLAGS, "--load-hf", tmp_path / "hf", "--train-iters", 1, "--log-jsonl", tmp_path / "log", "--optimizer-cpu-offload"])
    assert records(tmp_path / "log")[0]["loss"] == pytest.approx(_loss_of_transformers(model), rel=1e-5)


def test_converted_weights_start_the_same_run_and_a_changed_model_is_told(tmp_path):
    model = save_model(tmp_path / "hf")
    convert(["--from", "hf", "--to", "megacp", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "start")])
    flags = [
        *FLAGS,
        "--load-hf",
        tmp_path / "hf",
        "--load",
        tmp_path / "start",
        "--train-iters",
        1,
        "--log-jsonl",
        tmp_path / "log",
    ]
    output = _output_of(flags)
    assert f"loaded {tmp_path / 'start'}, step 0" in output and "warning" not in output
    assert records(tmp_path / "log")[0]["loss"] == pytest.approx(_loss_of_transformers(model), rel=1e-5)
    output = _output_of([*flags, "--rotary-base", 500000])
    assert "warning: the model of the checkpoint has rotary_base 10000.0, this run has 500000.0" in output


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path):
    save_model(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(dict(config, intermediate_size=81)))
    result = run([*FLAGS, "--load-hf", tmp_path / "hf"])
    assert result.returncode == 2
    assert result.stderr.strip().endswith("tensor model.layers.0.mlp.gate_proj.weight is [80, 48], and [81, 48] by config.json")


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    save_model(directory)
    return directory


def _validated(folder, *flags):
    args = parse_args([*FLAGS, "--load-hf", str(folder), *map(str, flags)])
    validate_args(args, world_size=1)
    return model_config_from_args(args)


def test_the_model_is_that_of_the_folder(folder):
    assert _validated(folder) == model_config(folder)
    assert _validated(folder, "--num-layers", 2, "--vocab-size", VOCABULARY, "--no-qk-layernorm") == model_config(folder)


def test_rotary_positions_and_context_may_be_changed(folder):
    flags = ["--rotary-base", 5e6, "--rope-scaling-type", "yarn", "--rope-scaling-factor", 16, "--max-position-embeddings", 8192]
    config = _validated(folder, *flags, "--rope-original-max-position-embeddings", 64)
    assert (config.rotary_base, config.max_position_embeddings) == (5e6, 8192)
    assert config.rope_scaling == RopeScaling("yarn", 16.0, 64)
    assert config.num_layers == 2


CONTRADICTIONS = {
    "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
    "vocab_size": 256, "norm_epsilon": 1e-5, "qk_layernorm": True, "untie_embeddings_and_output_weights": False,
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED_BY_WEIGHTS)
def test_a_flag_that_contradicts_the_weights_is_named(folder, name):
    flag, value = "--" + name.replace("_", "-"), CONTRADICTIONS[name]
    flags = [flag if value else flag.replace("--", "--no-")] if isinstance(value, bool) else [flag, value]
    with pytest.raises(
        ArgumentError, match=f"{flag} {value} contradicts --load-hf .*; without {flag} works".replace("1e-05", ".*")
    ):
        _validated(folder, *flags)


@pytest.mark.parametrize("flags", [["--model", "llama3-8b"], ["--init-method-std", 0.1]])
def test_a_flag_without_a_meaning_is_named(folder, flags):
    with pytest.raises(ArgumentError, match=f"without {flags[0]} works"):
        _validated(folder, *flags)
