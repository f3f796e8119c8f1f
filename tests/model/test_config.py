"""A preset that differs from the published model would train something that no checkpoint fits."""

import doctest
import json

import pytest

import megacp.model.config
from megacp.model.config import PRESETS, preset

# Counted by Hugging Face / the model cards; for the 8B and Qwen3 models also the bytes of the published bf16 checkpoints / 2.
PUBLISHED_PARAMETERS = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 16_060_522_496 // 2,
    "llama3-70b": 70_553_706_496,
    "qwen3-8b": 16_381_470_720 // 2,
    "qwen3-32b": 65_524_246_528 // 2,
}
PUBLISHED_TENSORS = {"llama3-8b": 291, "qwen3-8b": 399, "qwen3-32b": 707}

# The fields of the published config.json files, in transformers' names.
PUBLISHED_CONFIGS = {
    "llama3.2-1b": '{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, '
    '"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "rope_scaling": {"factor": 32.0, '
    '"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}',
    "llama3.2-3b": '{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, '
    '"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, '
    '"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "rope_scaling": {"factor": 32.0, '
    '"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}',
    "llama3-8b": '{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192, '
    '"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "rope_scaling": null}',
    "llama3-70b": '{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, '
    '"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192, '
    '"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "rope_scaling": null}',
    "qwen3-8b": '{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, '
    '"rope_theta": 1000000, "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "rope_scaling": null}',
    "qwen3-32b": '{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, '
    '"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, '
    '"rope_theta": 1000000, "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "rope_scaling": null}',
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_is_the_published_one(name):
    assert preset(name).parameter_count() == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_TENSORS)
def test_tensor_count_is_the_published_one(name):
    config = preset(name)
    per_layer = 7 + 2 + (2 if config.qk_layernorm else 0)
    assert config.num_layers * per_layer + 2 + config.untie_embeddings_and_output_weights == PUBLISHED_TENSORS[name]


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_fields_are_the_published_ones(name):
    published, config = json.loads(PUBLISHED_CONFIGS[name]), preset(name)
    assert config.num_layers == published["num_hidden_layers"]
    assert config.hidden_size == published["hidden_size"]
    assert config.ffn_hidden_size == published["intermediate_size"]
    assert config.num_attention_heads == published["num_attention_heads"]
    assert config.num_query_groups == published["num_key_value_heads"]
    assert config.kv_channels == published["head_dim"]
    assert config.vocab_size == published["vocab_size"]
    assert config.max_position_embeddings == published["max_position_embeddings"]
    assert config.rotary_base == published["rope_theta"]
    assert config.norm_epsilon == published["rms_norm_eps"]
    assert config.untie_embeddings_and_output_weights == (not published["tie_word_embeddings"])
    assert config.qk_layernorm == name.startswith("qwen3")
    if published["rope_scaling"] is None:
        assert config.rope_scaling is None
    else:
        scaling = dict(published["rope_scaling"])
        assert config.rope_scaling.type == scaling.pop("rope_type")
        for field, value in scaling.items():
            assert getattr(config.rope_scaling, field) == value, field


@pytest.mark.parametrize("name", ["llama-tiny", "llama3.2-1b", "qwen3-8b"])
def test_parameter_count_equals_transformers(name):
    """An independent count: the Hugging Face model of the same shape, on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = preset(name)
    family = transformers.Qwen3Config if config.qk_layernorm else transformers.LlamaConfig
    theirs = family(
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab_size=config.vocab_size,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()


def test_every_preset_is_a_legal_decoder():
    for name, config in PRESETS.items():
        assert config.name == name
        assert config.num_attention_heads % config.num_query_groups == 0
        assert config.kv_channels % 2 == 0


def test_unknown_preset_names_the_nearest_and_all():
    with pytest.raises(ValueError) as error:
        preset("Qwen3-8")
    assert "--model Qwen3-8 " in str(error.value)
    assert "qwen3-8b is the nearest" in str(error.value)
    assert all(name in str(error.value) for name in PRESETS)


def test_docstring_examples_are_true():
    assert doctest.testmod(megacp.model.config).failed == 0
