"""Conversions as a user runs them: there and back without a changed bit, whole or not at all, in the memory of a shard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megacp import parallel_state
from megacp.checkpointing.distributed import load_checkpoint, save_checkpoint
from megacp.checkpointing.huggingface import HuggingFaceWeights, hugging_face_name
from megacp.checkpointing.huggingface_config import config_to_hugging_face
from megacp.checkpointing.model_weights import TensorInfo, weight_shapes
from megacp.checkpointing.safetensors_folder import write_sharded
from megacp.checkpointing.weights import SavedWeights, config_to_json
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig
from megacp.parallel_state import ParallelLayout
from megacp.training.optimizer import build_optimizer
from megacp.training.sharding import allocate_weights, build_model
from tests.checkpointing.meta_folders import meta_model, save_as_meta
from tests.checkpointing.pretrained_models import MODELS, VOCABULARY, reload, save_model
from tests.distributed import run_distributed
from tools import convert_checkpoint
from tools.convert_checkpoint import main as convert

ROOT = Path(__file__).parents[2]


def converted(source, target, *flags, expect=0, input, output):
    code = convert(["--from", source, "--to", target, "--input", str(input), "--output", str(output), *map(str, flags)])
    assert code == expect
    return output


def bytes_of(directory):
    """Dtype, shape and bytes of every tensor, by name."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(path).items():
            found[name] = tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def logits(model):
    tokens_S = torch.randint(VOCABULARY, (1, 256), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens_S).logits


# ------------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_change_nothing(tmp_path, name, dtype):
    save_model(tmp_path / "hf", *MODELS[name], dtype=dtype, max_shard_size="50KB")
    converted("hf", "megacp", input=tmp_path / "hf", output=tmp_path / "ours")
    back = converted("megacp", "hf", "--max-shard-size", "70KB", input=tmp_path / "ours", output=tmp_path / "back")
    assert bytes_of(back) == bytes_of(tmp_path / "hf")
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (back / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert torch.equal(logits(reload(back, dtype)), logits(reload(tmp_path / "hf", dtype)))
    shards = list(back.glob("*.safetensors"))
    assert len(shards) > 1 and max(path.stat().st_size for path in shards) < 75_000  # 70 KB and a header


def test_dtype_is_chosen_and_said(tmp_path):
    model = save_model(tmp_path / "hf")
    for flag, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        output = converted("hf", "hf", "--dtype", flag, input=tmp_path / "hf", output=tmp_path / flag)
        assert json.loads((output / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        for name, tensor in safetensors.torch.load_file(output / "model.safetensors").items():
            assert torch.equal(tensor, model.state_dict()[name].to(dtype))


def test_from_meta(tmp_path):
    """The exported folder computes what the model did from which Meta's files were made."""
    (tmp_path / "meta").mkdir()
    model = meta_model()
    save_as_meta(tmp_path / "meta", model, 2)
    (tmp_path / "meta" / "tokenizer.model").write_text("pieces")
    output = converted("meta", "hf", input=tmp_path / "meta", output=tmp_path / "hf")
    assert torch.equal(logits(reload(output)), logits(model))
    assert (output / "tokenizer.model").read_text() == "pieces"


# ---------------------------------------------------------------------------------------------- checkpoints of training


def _train_one_step(rank, world_size, start, directory):
    """Loads converted weights with a fresh optimizer, moves them by known amounts and saves. Returns what was loaded."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, 1))
    config = SavedWeights(start).config
    model = build_model(config, parallel_state.get_data_context_mesh(), torch.float32)
    allocate_weights(model, torch.device("cpu"), 0)
    optimizer = build_optimizer(model, lr=0.5, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    state = load_checkpoint(start, model, optimizer)
    loaded = {name: weight.full_tensor().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()  # AdamW's first step from fresh moments: minus the learning rate
    save_checkpoint(directory, 1, model, optimizer, {"model_config": config_to_json(config)})
    return state, loaded


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_starts_from_converted_weights_and_is_exported(tmp_path, world_size):
    save_model(tmp_path / "hf", *MODELS["llama, yarn, tied"])
    converted("hf", "megacp", input=tmp_path / "hf", output=tmp_path / "start")
    results = run_distributed(_train_one_step, world_size, tmp_path / "start", tmp_path / "run")
    weights = HuggingFaceWeights(tmp_path / "hf")
    for state, loaded in results:
        assert state["iteration"] == state["consumed_samples"] == 0
        assert all(torch.equal(loaded[name], weights.read(name)) for name in weights.tensors)
    output = converted("megacp", "hf", "--hf-files", tmp_path / "hf", input=tmp_path / "run", output=tmp_path / "trained")
    trained = HuggingFaceWeights(output)
    for name in weights.tensors:
        torch.testing.assert_close(trained.read(name), weights.read(name) - 0.5, rtol=0, atol=1e-6)
    assert json.loads((output / "config.json").read_text()) == json.loads((tmp_path / "hf" / "config.json").read_text())


def test_an_export_needs_nothing_but_the_checkpoint(tmp_path):
    model = save_model(tmp_path / "hf", *MODELS["qwen3, yarn, tied"])
    converted("hf", "megacp", input=tmp_path / "hf", output=tmp_path / "ours")
    (tmp_path / "ours" / "huggingface").rename(tmp_path / "elsewhere")
    output = converted("megacp", "hf", input=tmp_path / "ours", output=tmp_path / "back")
    assert torch.equal(logits(reload(output)), logits(model))


# ------------------------------------------------------------------------------------------------------ longer context


def test_yarn_for_a_longer_context(tmp_path, capsys):
    """Stretched from the 64 tokens before llama3's scaling; transformers and --load read the same."""
    save_model(tmp_path / "hf", *MODELS["llama, llama3 scaling"])
    flags = ["--extend-context", 4096, "--rope-scaling-type", "yarn", "--rope-beta-fast", 4]
    output = converted("hf", "hf", *flags, input=tmp_path / "hf", output=tmp_path / "long")
    assert "context 512 -> 4,096 tokens" in capsys.readouterr().out
    theirs = reload(output).config
    assert theirs.max_position_embeddings == 4096
    expected = dict(
        rope_type="yarn", rope_theta=10000.0, factor=64.0, original_max_position_embeddings=64, beta_fast=4, beta_slow=1
    )
    assert theirs.rope_parameters == expected
    scaling = RopeScaling("yarn", 64.0, 64, beta_fast=4.0, beta_slow=1.0)
    assert HuggingFaceWeights(output).config.rope_scaling == scaling
    assert bytes_of(output) == bytes_of(tmp_path / "hf")
    converted("hf", "megacp", *flags, input=tmp_path / "hf", output=tmp_path / "ours")
    config = SavedWeights(tmp_path / "ours").config
    assert (config.rope_scaling, config.max_position_embeddings) == (scaling, 4096)


def test_llama3_scaling_stretches_the_models_own_context(tmp_path):
    save_model(tmp_path / "hf", *MODELS["qwen3"])
    flags = ["--extend-context", 4096, "--rope-scaling-type", "llama3", "--rope-scaling-factor", 8]
    theirs = reload(converted("hf", "hf", *flags, input=tmp_path / "hf", output=tmp_path / "long")).config
    assert (theirs.rope_parameters["original_max_position_embeddings"], theirs.rope_parameters["factor"]) == (512, 8.0)


def test_a_config_of_another_model_is_named(tmp_path, capsys):
    save_model(tmp_path / "hf")
    save_model(tmp_path / "other", *MODELS["qwen3"])
    converted("hf", "megacp", input=tmp_path / "hf", output=tmp_path / "ours")
    flags = ["--hf-files", tmp_path / "other"]
    converted("megacp", "hf", *flags, expect=2, input=tmp_path / "ours", output=tmp_path / "out")
    assert f"--hf-files {tmp_path / 'other'}: config.json is of another model" in capsys.readouterr().err


def test_a_larger_base_for_a_longer_context(tmp_path):
    save_model(tmp_path / "hf", *MODELS["qwen3"])
    flags = ["--extend-context", 4096, "--rotary-base", 8e7]
    theirs = reload(converted("hf", "hf", *flags, input=tmp_path / "hf", output=tmp_path / "long")).config
    assert (theirs.max_position_embeddings, theirs.rope_parameters) == (4096, dict(rope_type="default", rope_theta=8e7))


@pytest.mark.parametrize("flags, message", [
    (["--extend-context", 4096], "--extend-context 4096 needs --rotary-base BASE or --rope-scaling-type yarn"),
    (["--rotary-base", 1e6], "--rotary-base changes the context of the model; --extend-context 1048576"),
    (["--extend-context", 4096, "--rope-scaling-type", "yarn", "--rope-low-freq-factor", 2], "--rope-low-freq-factor 2 means nothing"),
    (["--extend-context", 511, "--rotary-base", 1e6], "511 is less than the 512 tokens of the model; 1024 works"),
    (["--extend-context", 4096, "--rope-scaling-type", "llama3"], "over the original 64; --rope-scaling-factor 64 works"),
    (["--iteration", 3], "--iteration 3 means nothing with --from hf"),
])  # fmt: skip
def test_context_flags_that_contradict(tmp_path, capsys, flags, message):
    save_model(tmp_path / "hf")
    converted("hf", "hf", *flags, expect=2, input=tmp_path / "hf", output=tmp_path / "long")
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


# -------------------------------------------------------------------------------------------------- whole or not at all


def test_an_output_that_exists_is_not_touched(tmp_path, capsys):
    save_model(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    converted("hf", "hf", expect=2, input=tmp_path / "hf", output=tmp_path / "out")
    assert f"--output {tmp_path / 'out'} exists" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


def test_bad_input_leaves_nothing_behind(tmp_path, capsys):
    save_model(tmp_path / "hf", tied=True)
    tensors = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1  # found when it is read, in the middle
    safetensors.torch.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    for target in ("hf", "megacp"):
        converted("hf", target, expect=2, input=tmp_path / "hf", output=tmp_path / "out")
        assert "lm_head.weight is not equal" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["hf"]


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    save_model(tmp_path / "hf")
    converted("hf", "megacp", input=tmp_path / "hf", output=tmp_path / "ours")
    data = next((tmp_path / "ours" / "iter_0000000").glob("*.distcp"))
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    converted("megacp", "hf", expect=2, input=tmp_path / "ours", output=tmp_path / "back")
    assert f"{data.name} is damaged" in capsys.readouterr().err
    converted("megacp", "hf", expect=2, input=tmp_path / "hf", output=tmp_path / "back")
    assert "there is no complete checkpoint in it" in capsys.readouterr().err
    converted("megacp", "hf", expect=2, input=tmp_path / "ours" / "iter_0000000", output=tmp_path / "back")
    assert f"in it, for it is one itself; {tmp_path / 'ours'} with --iteration 0 works" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def run_tool(code, *arguments, **options):
    """Python code in a process of its own, with the tool's arguments."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120, **options
    )


FULL_DISK = """
import resource, signal, sys
from tools.convert_checkpoint import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a file that grows further is an OSError, as on a full disk
sys.exit(main())
"""


@pytest.mark.parametrize("target", ["hf", "megacp"])
def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path, target):
    save_model(tmp_path / "hf")
    result = run_tool(FULL_DISK, "--from", "hf", "--to", target, "--input", tmp_path / "hf", "--output", tmp_path / "out")
    assert result.returncode == 1, result.stderr
    assert f"error: --output {tmp_path / 'out'} was not written: [Errno 27] File too large" in result.stderr
    assert os.listdir(tmp_path) == ["hf"]


def test_too_little_space_is_told_before_anything_is_written(tmp_path, capsys, monkeypatch):
    save_model(tmp_path / "hf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    converted("hf", "hf", expect=1, input=tmp_path / "hf", output=tmp_path / "out")
    assert "too little space" in capsys.readouterr().err


def test_what_a_killed_conversion_left_is_no_hindrance(tmp_path):
    save_model(tmp_path / "hf")
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete" / "model-00007-of-00009.safetensors").touch()
    output = converted("hf", "hf", input=tmp_path / "hf", output=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    assert "model-00007-of-00009.safetensors" not in os.listdir(output)


WAITS_TO_WRITE = """
import sys
import tools.convert_checkpoint as tool
write = tool.write

def waiting(*arguments):
    print("begun", flush=True)
    sys.stdin.read()
    write(*arguments)

tool.write = waiting
sys.exit(tool.main())
"""


def begun_conversion(folder):
    """Another process that converts folder/hf to folder/out, and goes on when its standard input is closed."""
    arguments = ["--from", "hf", "--to", "hf", "--input", folder / "hf", "--output", folder / "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_TO_WRITE, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout.readline() == b"begun\n"
    return process


def test_a_second_conversion_keeps_away_from_what_the_first_writes(tmp_path, capsys):
    save_model(tmp_path / "hf")
    with begun_conversion(tmp_path) as first:
        converted("hf", "megacp", expect=2, input=tmp_path / "hf", output=tmp_path / "out")
        told = f"--output {tmp_path / 'out'} is being written by process {first.pid} on {os.uname().nodename}; another name works"
        assert told in capsys.readouterr().err
        converted("hf", "hf", input=tmp_path / "hf", output=tmp_path / "other")
        first.stdin.close()
        assert first.wait() == 0
    assert sorted(os.listdir(tmp_path)) == ["hf", "other", "out"]
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "hf")


def test_a_conversion_that_ends_meanwhile_is_not_replaced(tmp_path, capsys, monkeypatch):
    """The second one looks for --output while the first still writes, and locks when the first has ended."""
    save_model(tmp_path / "hf")
    open_weights = convert_checkpoint.open_weights

    def while_the_first_ends(args):
        monkeypatch.setattr(convert_checkpoint, "open_weights", open_weights)
        converted("hf", "hf", input=tmp_path / "hf", output=tmp_path / "out")
        return open_weights(args)

    monkeypatch.setattr(convert_checkpoint, "open_weights", while_the_first_ends)
    converted("hf", "megacp", expect=2, input=tmp_path / "hf", output=tmp_path / "out")
    assert f"--output {tmp_path / 'out'} exists; a name that is free works" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"] and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "hf")


def test_after_a_kill_the_same_conversion_works(tmp_path):
    save_model(tmp_path / "hf")
    with begun_conversion(tmp_path) as first:
        first.kill()
    assert (tmp_path / "out.incomplete").is_dir()
    converted("hf", "hf", input=tmp_path / "hf", output=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]


# --------------------------------------------------------------------------------------------------------------- memory

MEASURED = """
import re, sys
from tools.convert_checkpoint import main
code = main()
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""
SHARD = 100 * 10**6  # bytes; the largest tensor, the embedding, has 25 MB


def _peak_bytes(*arguments):
    result = run_tool(MEASURED, *arguments)
    assert result.returncode == 0, result.stderr
    return 1024 * int(result.stdout.split()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_is_that_of_a_shard(tmp_path):
    """A model of 400 MB, and the growth over the peak of converting one of 0.2 MB: one copy of the largest
    tensor going in, three coming out."""
    config = ModelConfig(
        name="large", num_layers=12, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, num_query_groups=8, kv_channels=64,
        vocab_size=12000, max_position_embeddings=8192, rotary_base=5e5, rope_scaling=None, norm_epsilon=1e-5, qk_layernorm=False,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    infos = {hugging_face_name(name): TensorInfo(shape, torch.bfloat16) for name, shape in weight_shapes(config).items()}
    assert 400e6 < sum(info.bytes for info in infos.values()) < 500e6
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(config_to_hugging_face(config, torch.bfloat16)))
    zeros = torch.zeros(max(info.bytes for info in infos.values()) // 2, dtype=torch.bfloat16)
    write_sharded(tmp_path / "large", infos, lambda name: zeros[: infos[name].bytes // 2].view(infos[name].shape), SHARD)
    save_model(tmp_path / "small", dtype=torch.bfloat16)
    small, large, ours = tmp_path / "small", tmp_path / "large", tmp_path / "ours"
    base = _peak_bytes("--from", "hf", "--to", "megacp", "--input", small, "--output", tmp_path / "small ours")
    into = _peak_bytes("--from", "hf", "--to", "megacp", "--input", large, "--output", ours)
    back = _peak_bytes("--from", "megacp", "--to", "hf", "--input", ours, "--output", tmp_path / "back", "--max-shard-size", SHARD)
    print(f"peaks: {base / 1e6:.0f} MB for a small model, {into / 1e6:.0f} in, {back / 1e6:.0f} out")
    assert max(into, back) - base < SHARD
