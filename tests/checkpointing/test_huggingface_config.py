"""config.json in and out: published ones, both dialects of rotary positions, and every refusal naming what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch

from megacp.checkpointing.huggingface_config import config_from_hugging_face, config_to_hugging_face, model_config
from megacp.checkpointing.model_weights import PretrainedError, weight_shapes
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import PRESETS
from tests.checkpointing.pretrained_models import DEFAULT, LLAMA3, YARN, transformers

# As published, version 4's dialect.
LLAMA_31_8B = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
  "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}""")
QWEN3_8B = json.loads("""{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""")
# Older than grouped queries, head_dim and rope_theta.
LLAMA_2_7B = json.loads("""{
  "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
  "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
  "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}""")
V5 = dict(LLAMA_31_8B, rope_parameters=dict(LLAMA_31_8B["rope_scaling"], rope_theta=500000.0))
del V5["rope_scaling"], V5["rope_theta"]


def test_published_models():
    llama, qwen = config_from_hugging_face(LLAMA_31_8B, "x"), config_from_hugging_face(QWEN3_8B, "qwen3-8b")
    assert llama.parameter_count() == 8_030_261_248  # 16,060,522,496 bytes in bf16
    assert llama.rope_scaling == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (llama.kv_channels, llama.max_position_embeddings, llama.rotary_base) == (128, 131072, 500000.0)
    assert qwen == PRESETS["qwen3-8b"] and qwen.parameter_count() == 8_190_735_360
    old = config_from_hugging_face(LLAMA_2_7B, "llama-2")
    assert (old.num_query_groups, old.kv_channels, old.rotary_base, old.rope_scaling) == (32, 128, 10000.0, None)
    assert old.parameter_count() == 6_738_415_616 and old.untie_embeddings_and_output_weights


@pytest.mark.parametrize("values, tensors, size", [
    (LLAMA_31_8B, 291, 16_060_522_496),
    (QWEN3_8B, 399, 16_381_470_720),
    (dict(QWEN3_8B, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64), 707, 65_524_246_528),
], ids=["Llama-3.1-8B", "Qwen3-8B", "Qwen3-32B"])  # fmt: skip
def test_published_tensors_and_bytes(values, tensors, size):
    """metadata.total_size of the published indices, bf16."""
    shapes = weight_shapes(config_from_hugging_face(values, "x"))
    assert len(shapes) == tensors and sum(2 * math.prod(shape) for shape in shapes.values()) == size


def test_both_dialects_are_one_model():
    assert config_from_hugging_face(V5, "x") == config_from_hugging_face(LLAMA_31_8B, "x")
    assert config_from_hugging_face(V5 | LLAMA_31_8B, "x") == config_from_hugging_face(LLAMA_31_8B, "x")
    older_key = dict(LLAMA_31_8B, rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768})
    assert config_from_hugging_face(older_key, "x").rope_scaling == RopeScaling("yarn", 4.0, 32768)
    without_original = dict(LLAMA_31_8B, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert config_from_hugging_face(without_original, "x").rope_scaling == RopeScaling("yarn", 4.0, 131072)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_round_trip(name):
    values = json.loads(json.dumps(config_to_hugging_face(PRESETS[name], torch.bfloat16)))
    assert config_from_hugging_face(values, name) == PRESETS[name]
    assert "rope_theta" in values and "rope_parameters" not in values  # version 4 would not see the latter


@pytest.mark.parametrize(
    "rope", [DEFAULT, LLAMA3, YARN, dict(YARN, attention_factor=1.25)], ids=["default", "llama3", "yarn", "factor"]
)
@pytest.mark.parametrize("family, tied", [("Llama", False), ("Qwen3", True)])
def test_transformers_reads_back_what_is_written(family, tied, rope):
    """And not its defaults in place of what it does not find."""
    ours = config_from_hugging_face(
        getattr(transformers, f"{family}Config")(
            vocab_size=77, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            head_dim=16, rms_norm_eps=1e-4, tie_word_embeddings=tied, rope_parameters=dict(rope, rope_theta=5e5),
            max_position_embeddings=1000,
        ).to_dict(),
        "x",
    )  # fmt: skip
    assert ours.rotary_base == 5e5 and ours.norm_epsilon == 1e-4 and ours.kv_channels == 16
    theirs = transformers.AutoConfig.for_model(**config_to_hugging_face(ours, torch.float32))
    assert config_from_hugging_face(theirs.to_dict(), "x") == ours
    assert theirs.rope_parameters == dict(rope, rope_theta=5e5)


def test_an_unchanged_config_goes_out_as_it_came():
    for values in (LLAMA_31_8B, QWEN3_8B, LLAMA_2_7B, V5):
        config = config_from_hugging_face(values, "x")
        kept = torch.float16 if values is LLAMA_2_7B else torch.bfloat16
        assert config_to_hugging_face(config, kept, values) == values
        assert config_to_hugging_face(config, torch.float32, values) == values | {"torch_dtype": "float32"}


def test_a_config_of_another_model_is_not_mixed_in():
    with pytest.raises(PretrainedError, match="another model: num_layers 36, the weights' is 32"):
        config_to_hugging_face(config_from_hugging_face(LLAMA_31_8B, "x"), torch.bfloat16, QWEN3_8B)


REFUSALS = {
    "model_type": dict(model_type="mistral"),
    "attention_bias": dict(attention_bias=True),
    "mlp_bias": dict(mlp_bias=True),
    "hidden_act": dict(hidden_act="gelu"),
    "attention_dropout": dict(attention_dropout=0.1),
    "quantization_config": dict(quantization_config={"quant_method": "gptq", "bits": 4}),
    "sliding_window": dict(sliding_window=4096),
    "partial_rotary_factor": dict(partial_rotary_factor=0.5),
    "auto_map": dict(auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
    "residual_multiplier": dict(residual_multiplier=0.22),  # Granite's, in a config that says llama
    "layer_types": dict(layer_types=["full_attention", "sliding_attention"]),
    "linear": dict(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "dynamic": dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "longrope": dict(rope_scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    "mscale": dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}),
    "truncate": dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "truncate": False}),
    "low_freq_factor": dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}),
    "at least 1": dict(rope_scaling={"rope_type": "yarn", "factor": 0.5}),
    "contradict": dict(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "rope_theta": dict(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "hidden_size": dict(hidden_size="4096"),
    "vocab_size": dict(vocab_size=None),
    "head_dim": dict(hidden_size=4100),
}


@pytest.mark.parametrize("named", REFUSALS)
def test_what_is_not_known_is_refused_by_name(named):
    with pytest.raises(PretrainedError, match=named):
        config_from_hugging_face(LLAMA_31_8B | REFUSALS[named], "x")


def test_a_window_that_is_switched_off_is_none():
    off = dict(QWEN3_8B, sliding_window=4096, use_sliding_window=False)
    assert config_from_hugging_face(off, "x") == config_from_hugging_face(QWEN3_8B, "x")
    with pytest.raises(PretrainedError, match="use_sliding_window"):
        config_from_hugging_face(dict(off, use_sliding_window=True), "x")


def test_errors_name_the_file(tmp_path):
    with pytest.raises(PretrainedError, match=f"{tmp_path}/config.json cannot be read"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PretrainedError, match=f"{tmp_path}/config.json is not JSON"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(LLAMA_31_8B, mlp_bias=True)))
    with pytest.raises(PretrainedError, match=f'{tmp_path}/config.json: "mlp_bias": true is not supported; false is'):
        model_config(tmp_path)


@pytest.mark.parametrize("own, reach", [(8192, 131072), (262144, 262144)])
def test_yarns_factor_is_also_what_the_positions_say(own, reach):
    """transformers 4 divides max_position_embeddings by the original ones, whatever factor rope_scaling has."""
    config = replace(PRESETS["llama3-8b"], max_position_embeddings=own, rope_scaling=RopeScaling("yarn", 16.0, 8192))
    values = config_to_hugging_face(config, torch.bfloat16)
    assert values["max_position_embeddings"] == reach
    assert config_from_hugging_face(values, "x").rope_scaling == config.rope_scaling
