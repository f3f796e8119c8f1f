"""Between a Hugging Face `config.json` and a ModelConfig, for Llama 2, 3, 3.1, 3.2 and dense Qwen3.

    config = config_from_hugging_face(json.load(open("Llama-3.1-8B/config.json")), "Llama-3.1-8B")
    config.rope_scaling      # RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    values = config_to_hugging_face(config, torch.bfloat16)      # a dict that transformers 4 and 5 read

Rotary positions come in two dialects, both read:

    transformers 4    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, …} or null
    transformers 5    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, …}

The dialect of version 4 is written, for version 5 reads it and version 4 passes over `rope_parameters` in silence; a config
that is changed keeps its own. A setting that is not known here might change the model's numbers, so it is refused by name.
"""

import dataclasses
import json
from pathlib import Path

import torch

from megacp.checkpointing.model_weights import PretrainedError
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig

CONFIG = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIELDS = {  # ours: theirs
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
}
# Fields that a run or a conversion may change; the others are the shape of the weights and what they were trained with.
CHANGEABLE = ("name", "max_position_embeddings", "rotary_base", "rope_scaling", "init_method_std")
# Settings with one value that this code computes.
REQUIRED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "quantization_config": None, "is_encoder_decoder": False, "add_cross_attention": False,
    "auto_map": None,
}  # fmt: skip
# Settings that change no number of a forward or backward.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "pretraining_tp", "max_window_layers", "tokenizer_class", "return_dict", "output_attentions",
    "output_hidden_states", "id2label", "label2id", "problem_type", "finetuning_task", "torchscript", "chunk_size_feed_forward",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window",
}  # fmt: skip
ROPE_KEYS = {
    "default": (),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
DEFAULT_THETA = 10000.0
QWEN3_HEAD_DIM = 128


def read_config(directory: Path | str) -> dict:
    """The `config.json` of a folder."""
    path = Path(directory) / CONFIG
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read ({error.strerror}); a folder saved by transformers has one") from error
    except ValueError as error:
        raise PretrainedError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise PretrainedError(f"{path} is not a JSON object")
    return values


def model_config(directory: Path | str) -> ModelConfig:
    """The model of a folder, called after the folder. Raises PretrainedError naming the file."""
    values = read_config(directory)
    try:
        return config_from_hugging_face(values, Path(directory).resolve().name)
    except PretrainedError as error:
        raise PretrainedError(f"{Path(directory) / CONFIG}: {error}") from None


def config_from_hugging_face(values: dict, name: str) -> ModelConfig:
    """Raises PretrainedError for a model, a setting or a value that is not known."""
    family = values.get("model_type")
    if family not in ARCHITECTURES:
        raise PretrainedError(f"{_shown('model_type', family)} is not known; {' and '.join(ARCHITECTURES)} are")
    _refuse_unknown(values, family)
    values = {key: value for key, value in values.items() if value is not None}
    heads = _count(values, "num_attention_heads")
    defaults = {"llama": dict(num_key_value_heads=heads), "qwen3": dict(head_dim=QWEN3_HEAD_DIM)}[family]
    values = {"initializer_range": 0.02} | defaults | values
    if "head_dim" not in values:
        hidden = _count(values, "hidden_size")
        if hidden % heads:
            raise PretrainedError(
                f'"hidden_size": {hidden} is not a multiple of "num_attention_heads": {heads}; "head_dim" is needed'
            )
        values["head_dim"] = hidden // heads
    fields = {ours: _count(values, theirs) for ours, theirs in FIELDS.items() if ours not in ("norm_epsilon", "init_method_std")}
    theta, scaling = _rope(values)
    return ModelConfig(
        name=name, **fields, rotary_base=theta, rope_scaling=scaling, norm_epsilon=_number(values, "rms_norm_eps"),
        qk_layernorm=family == "qwen3", untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", False),
        init_method_std=_number(values, "initializer_range"),
    )  # fmt: skip


def config_to_hugging_face(config: ModelConfig, dtype: torch.dtype, base: dict | None = None) -> dict:
    """The `config.json` of `config`, with weights in `dtype`.

    `base`: the config.json the weights came with. What is not ours to say (token ids, versions) stays as it is there, and when the
    model is unchanged so does all but the dtype. Without it the token ids are null. Raises PretrainedError when `base` is of another model.
    """
    family = "qwen3" if config.qk_layernorm else "llama"
    if base is None:
        values = {"architectures": [ARCHITECTURES[family]], "model_type": family, "bos_token_id": None, "eos_token_id": None,
                  "hidden_act": "silu", "attention_bias": False}  # fmt: skip
        _set_model(values, config)
    else:
        before, values = config_from_hugging_face(base, config.name), dict(base)
        other = [name for name in _differences(before, config) if name not in CHANGEABLE]
        if other:
            name = other[0]
            raise PretrainedError(
                f"{CONFIG} is of another model: {name} {getattr(before, name)}, the weights' is {getattr(config, name)}"
            )
        if _differences(before, config):
            _set_model(values, config)
    values["dtype" if "dtype" in values else "torch_dtype"] = str(dtype).removeprefix("torch.")
    return values


def _set_model(values: dict, config: ModelConfig) -> None:
    values |= {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    if config.rope_scaling is not None and config.rope_scaling.type == "yarn":
        # transformers 4 takes the factor from this, whatever rope_scaling says.
        reach = int(config.rope_scaling.factor * config.rope_scaling.original_max_position_embeddings)
        values["max_position_embeddings"] = max(config.max_position_embeddings, reach)
    values["tie_word_embeddings"] = not config.untie_embeddings_and_output_weights
    scaling = {"rope_type": "default"} if config.rope_scaling is None else _scaling_values(config.rope_scaling)
    if "rope_parameters" in values:
        values["rope_parameters"] = {"rope_theta": config.rotary_base} | scaling
        for key in ("rope_theta", "rope_scaling"):
            values.pop(key, None)
    else:
        values |= {"rope_theta": config.rotary_base, "rope_scaling": None if config.rope_scaling is None else scaling}


def _scaling_values(scaling: RopeScaling) -> dict:
    values = {key: getattr(scaling, key) for key in ROPE_KEYS[scaling.type]}
    return {"rope_type": scaling.type} | {key: value for key, value in values.items() if value is not None}


def _differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "name"]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _refuse_unknown(values: dict, family: str) -> None:
    for key, value in values.items():
        if key in REQUIRED:
            if value is not None and value != REQUIRED[key]:
                raise PretrainedError(f"{_shown(key, value)} is not supported; {json.dumps(REQUIRED[key])} is")
        elif key == "sliding_window":  # Qwen3 writes a window that use_sliding_window switches off
            if value is not None and family != "qwen3":
                raise PretrainedError(f"{_shown(key, value)} is not supported; null is")
        elif key == "layer_types":
            other = sorted(set(value or ()) - {"full_attention"})
            if other:
                raise PretrainedError(f'"layer_types" has {other[0]}, which is not supported; full_attention is')
        elif key not in HARMLESS and key not in FIELDS.values() and not key.startswith("_") and value is not None:
            raise PretrainedError(
                f"{_shown(key, value)} is a setting that is not known here; if the model computes the same without it, remove it"
            )


def _rope(values: dict) -> tuple[float, RopeScaling | None]:
    """Base and scaling. A file may speak both dialects, if it says the same in both."""
    found = [_rope_of(values, key) for key in ("rope_parameters", "rope_scaling") if values.get(key)] or [_rope_of(values, "")]
    if found[0] != found[-1]:
        raise PretrainedError('"rope_scaling" and "rope_parameters" contradict each other; one of the two is enough')
    return found[0]


def _rope_of(values: dict, key: str) -> tuple[float, RopeScaling | None]:
    rope = {name: value for name, value in values.get(key, {}).items() if value is not None}
    thetas = [place["rope_theta"] for place in (rope, values) if "rope_theta" in place] or [DEFAULT_THETA]
    if thetas[0] != thetas[-1]:
        raise PretrainedError(f'"rope_theta" is {thetas[-1]} and, in "{key}", {thetas[0]}; one of the two is enough')
    theta = _number({"rope_theta": thetas[0]}, "rope_theta")
    rope.pop("rope_theta", None)
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    if kind not in ROPE_KEYS:
        raise PretrainedError(f'"{key}" of type {kind} is not known; {", ".join(ROPE_KEYS)} are')
    for name, usual in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if rope.pop(name, usual) != usual:
            raise PretrainedError(f'"{key}": "{name}" is not supported; {json.dumps(usual)}, its default, is')
    unknown = [name for name in rope if name not in ROPE_KEYS[kind]]
    if unknown:
        raise PretrainedError(f'"{key}" of type {kind} has {_shown(unknown[0], rope[unknown[0]])}, which is not known')
    if kind == "default":
        return theta, None
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
    for name in ROPE_KEYS["llama3"] if kind == "llama3" else ("factor",):
        if name not in rope:
            raise PretrainedError(f'"{key}" of type {kind} has no "{name}"')
    original = _count(rope, "original_max_position_embeddings")
    numbers = {name: _number(rope, name) for name in rope if name != "original_max_position_embeddings"}
    try:
        return theta, RopeScaling(kind, original_max_position_embeddings=original, **numbers)
    except ValueError as error:
        raise PretrainedError(f'"{key}": {error}') from error


def _count(values: dict, key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise PretrainedError(f"{_shown(key, value)} is not a positive whole number")
    return int(value)


def _number(values: dict, key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise PretrainedError(f"{_shown(key, value)} is not a positive number")
    return float(value)


def _shown(key: str, value) -> str:
    """As it stands in the file, shortened."""
    text = json.dumps(value)
    return f'"{key}": {text if len(text) <= 60 else text[:57] + "..."}'
