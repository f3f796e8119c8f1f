"""Meta's folders, made from transformers' weights, come in as those weights."""

import pytest
import torch

from megacp.checkpointing.huggingface import hugging_face_name
from megacp.checkpointing.meta import MetaWeights
from megacp.checkpointing.model_weights import PretrainedError
from tests.checkpointing.meta_folders import VOCABULARY, meta_model, save_as_meta


@pytest.mark.parametrize("shards, embedding_columns", [(1, False), (2, True), (4, False)], ids=["one", "Llama 2", "Llama 3"])
def test_shards_are_joined_and_heads_reordered(tmp_path, shards, embedding_columns):
    model = meta_model(dtype=torch.bfloat16)
    save_as_meta(tmp_path, model, shards, embedding_columns=embedding_columns)
    weights, theirs = MetaWeights(tmp_path), dict(model.named_parameters())
    assert weights.config.vocab_size == VOCABULARY and weights.config.ffn_hidden_size == 80
    for name, info in weights.tensors.items():
        weight = weights.read(name)
        assert torch.equal(weight, theirs.pop(hugging_face_name(name))), name
        assert (tuple(weight.shape), weight.dtype) == (info.shape, info.dtype)
    assert not theirs


@pytest.mark.parametrize("params, tied, context, theta, factor", [
    ({}, False, 4096, 10000.0, None),
    ({"rope_theta": 500000.0}, False, 8192, 500000.0, None),
    ({"rope_theta": 500000.0, "use_scaled_rope": True}, False, 131072, 500000.0, 8.0),
    ({"rope_theta": 500000.0, "use_scaled_rope": True}, True, 131072, 500000.0, 32.0),
], ids=["2", "3", "3.1", "3.2"])  # fmt: skip
def test_what_params_json_leaves_out(tmp_path, params, tied, context, theta, factor):
    save_as_meta(tmp_path, meta_model(tied=tied), 2, params)
    weights = MetaWeights(tmp_path)
    config = weights.config
    assert (config.max_position_embeddings, config.rotary_base) == (context, theta)
    assert (config.rope_scaling and config.rope_scaling.factor) == factor
    assert config.untie_embeddings_and_output_weights is not tied and ("output_head.lm_head" in weights.tensors) is not tied
    assert any(f"{context:,}" in line for line in weights.assumptions)


def test_errors_name_file_and_setting(tmp_path):
    with pytest.raises(PretrainedError, match="has no consolidated.00.pth"):
        MetaWeights(tmp_path)
    save_as_meta(tmp_path, meta_model(), 2)
    (tmp_path / "consolidated.00.pth").rename(tmp_path / "moved")
    with pytest.raises(PretrainedError, match="consolidated.00.pth is missing, and consolidated.01.pth is there"):
        MetaWeights(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes((tmp_path / "moved").read_bytes()[:1000])
    with pytest.raises(PretrainedError, match="consolidated.00.pth is damaged, cut short"):
        MetaWeights(tmp_path)
    (tmp_path / "moved").rename(tmp_path / "consolidated.00.pth")
    save_as_meta(tmp_path, meta_model(), 2, {"moe_args": {"num_experts": 16}})
    with pytest.raises(PretrainedError, match='params.json: "moe_args": .* is not known here'):
        MetaWeights(tmp_path)
    save_as_meta(tmp_path, meta_model(), 2, {"n_kv_heads": 2})
    with pytest.raises(PretrainedError, match=r"tensor layers.0.attention.wk.weight is \[24, 48\], and \[12, 48\] by params.json"):
        MetaWeights(tmp_path)
