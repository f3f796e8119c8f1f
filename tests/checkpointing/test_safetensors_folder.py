"""Files of weights: what is written is what the safetensors library reads, and damage is an error that names the file."""

import json

import pytest
import safetensors.torch
import torch

from megacp.checkpointing.model_weights import PretrainedError, TensorInfo
from megacp.checkpointing.safetensors_folder import INDEX, SINGLE, SafetensorsFolder, split_into_shards, write_sharded


def _tensors():
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(5, 3, generator=generator).bfloat16(),  # 30 bytes: what follows must still lie aligned
        "b": torch.randn(7, generator=generator),
        "c": torch.randn(4, 4, generator=generator).half().T,  # not contiguous
        "d": torch.randn(100, 3, generator=generator, dtype=torch.float64),
        "e": torch.randn(2, 2, generator=generator).bfloat16(),
    }


def _write(directory, tensors, max_bytes):
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_sharded(directory, infos, tensors.__getitem__, max_bytes)


@pytest.mark.parametrize("max_bytes, files", [(10**9, [SINGLE]), (100, [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)])])
def test_the_library_reads_what_is_written(tmp_path, max_bytes, files):
    tensors = _tensors()
    _write(tmp_path, tensors, max_bytes)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files
    theirs = {}
    for file in files:
        theirs |= safetensors.torch.load_file(tmp_path / file)
        theirs |= safetensors.torch.load((tmp_path / file).read_bytes())  # the strict parser: no holes, no overlaps
    assert theirs.keys() == tensors.keys()
    ours = SafetensorsFolder(tmp_path)
    for name, tensor in tensors.items():
        assert theirs[name].dtype == ours.read(name).dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor) and torch.equal(ours.read(name), tensor)
        assert torch.equal(ours.read(name, 1, 2), tensor[1:2])
        assert ours.tensors[name] == TensorInfo(tuple(tensor.shape), tensor.dtype)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()


def test_data_lies_at_multiples_of_its_item_size(tmp_path):
    """So that a reader may map it where it lies."""
    tensors = _tensors()
    _write(tmp_path, tensors, 10**9)
    data = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    places = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors}
    assert all(place % tensors[name].element_size() == 0 for name, place in places.items()), places


def test_shards_are_as_full_as_they_can_be():
    info = TensorInfo((10,), torch.float32)
    big = TensorInfo((100,), torch.float32)
    assert split_into_shards({"a": info, "b": info, "c": big, "d": info}, 80) == [["a", "b"], ["c"], ["d"]]
    assert split_into_shards({"a": info, "b": info, "c": info}, 79) == [["a"], ["b"], ["c"]]


def test_tensors_must_be_as_announced(tmp_path):
    with pytest.raises(ValueError, match="a was announced as"):
        write_sharded(tmp_path, {"a": TensorInfo((2,), torch.float32)}, lambda name: torch.zeros(3), 100)


def test_damage_names_the_file(tmp_path):
    with pytest.raises(PretrainedError, match=f"{tmp_path} has neither model.safetensors nor"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(PretrainedError, match="pytorch_model.bin is of another format"):
        SafetensorsFolder(tmp_path)

    _write(tmp_path, _tensors(), 100)
    second = tmp_path / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(PretrainedError, match="model-00002-of-00003.safetensors is damaged or cut short"):
        SafetensorsFolder(tmp_path)
    second.unlink()
    with pytest.raises(
        PretrainedError, match="model-00002-of-00003.safetensors is missing, and model.safetensors.index.json names it"
    ):
        SafetensorsFolder(tmp_path)
    second.write_bytes((tmp_path / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(PretrainedError, match="model-00002-of-00003.safetensors has no tensor d"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(PretrainedError, match="index.json is not an index"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(PretrainedError, match="outside the folder"):
        SafetensorsFolder(tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    safetensors.torch.save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(PretrainedError, match="w is I8; F64, F32, F16, BF16 are known"):
        SafetensorsFolder(tmp_path)
