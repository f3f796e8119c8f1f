"""Hugging Face folders as weights: what does not fit is named, and a rank reads the rows that it keeps."""

import json

import pytest
import safetensors.torch
import torch

from megacp import parallel_state
from megacp.checkpointing.huggingface import HuggingFaceWeights, hugging_face_name
from megacp.checkpointing.model_weights import PretrainedError
from megacp.model.row_shards import chunk_bounds
from megacp.parallel_state import ParallelLayout
from megacp.training.sharding import allocate_weights, build_model
from tests.checkpointing.pretrained_models import MODELS, save_model
from tests.distributed import run_distributed


def _change(directory, change):
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(tmp_path, name):
    model = save_model(tmp_path, *MODELS[name], max_shard_size="40KB")
    weights = HuggingFaceWeights(tmp_path)
    theirs = dict(model.named_parameters())
    for name in weights.tensors:
        assert torch.equal(weights.read(name), theirs.pop(hugging_face_name(name)))
    assert not theirs


def test_a_tensor_that_does_not_fit_is_named(tmp_path):
    save_model(tmp_path)
    norm, k_proj = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"
    _change(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(2)))
    with pytest.raises(PretrainedError, match=r"tensor extra \[2\] is not part of the model that config.json describes"):
        HuggingFaceWeights(tmp_path)
    _change(tmp_path, lambda tensors: (tensors.pop("extra"), tensors.update({k_proj: tensors[k_proj][:12].clone()})))
    with pytest.raises(PretrainedError, match=rf"tensor {k_proj} is \[12, 48\], and \[24, 48\] by config.json"):
        HuggingFaceWeights(tmp_path)
    _change(tmp_path, lambda tensors: tensors.pop(norm))
    with pytest.raises(PretrainedError, match=rf"tensor {norm} \[48\] is missing"):
        HuggingFaceWeights(tmp_path)


def test_saved_buffers_are_passed_over(tmp_path):
    save_model(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}))
    HuggingFaceWeights(tmp_path)


def test_a_tied_copy_of_the_embedding_must_be_a_copy(tmp_path):
    save_model(tmp_path, tied=True)
    embedding = HuggingFaceWeights(tmp_path).read("embedding.weight").clone()
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert torch.equal(HuggingFaceWeights(tmp_path).read("embedding.weight"), embedding)
    _change(tmp_path, lambda tensors: tensors["lm_head.weight"][100].add_(1))
    weights = HuggingFaceWeights(tmp_path)
    weights.read("embedding.weight", 0, 100)  # a rank sees to its own rows
    with pytest.raises(PretrainedError, match="lm_head.weight is not equal to model.embed_tokens.weight"):
        weights.read("embedding.weight", 100, 199)


def test_an_untied_model_needs_its_head(tmp_path):
    save_model(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(dict(config, tie_word_embeddings=False)))
    with pytest.raises(PretrainedError, match="lm_head.weight .* is missing"):
        HuggingFaceWeights(tmp_path)


def test_bounds_are_those_of_torch_chunk():
    for rows in range(1, 20):
        for chunks in range(1, 9):
            parts = [part.tolist() for part in torch.arange(rows).chunk(chunks)] + [[]] * chunks
            assert [list(range(*chunk_bounds(rows, chunks, i))) for i in range(chunks)] == parts[:chunks]


def _rows_read(rank, world_size, directory):
    """What this rank asked of the files, and whether the model then holds the folder's weights."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, 1))
    weights = HuggingFaceWeights(directory)
    read, rows = weights.read, []

    def recorded(name, start, stop):
        rows.append((name, start, stop))
        return read(name, start, stop)

    weights.read = recorded
    model = build_model(weights.config, parallel_state.get_data_context_mesh(), torch.float32)
    allocate_weights(model, torch.device("cpu"), 0, weights)
    equal = all(torch.equal(weight.full_tensor(), read(name).float()) for name, weight in model.named_parameters())
    return rows, equal


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_reads_its_own_rows_once(tmp_path, world_size):
    """3 ranks divide neither 199 rows of the embedding nor 16 of a norm; masters are fp32, the file is bf16."""
    save_model(tmp_path, *MODELS["qwen3"], dtype=torch.bfloat16, max_shard_size="40KB")
    by_rank = run_distributed(_rows_read, world_size, tmp_path)
    tensors = HuggingFaceWeights(tmp_path).tensors
    assert all(equal for _, equal in by_rank)
    for name, info in tensors.items():
        parts = [(start, stop) for rows, _ in by_rank for read_name, start, stop in rows if read_name == name]
        assert [row for part in parts for row in range(*part)] == list(range(info.shape[0]))
    if world_size > 1:
        largest = max(stop - start for rows, _ in by_rank for name, start, stop in rows if name == "embedding.weight")
        assert largest == -(-199 // world_size)
