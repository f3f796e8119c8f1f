"""Folders of safetensors files, one `model.safetensors` or shards with an index: read in parts, written as a stream.

    folder = SafetensorsFolder("Llama-3.1-8B")
    folder.tensors["lm_head.weight"]                    # TensorInfo(shape=(128256, 4096), dtype=torch.bfloat16)
    folder.read("lm_head.weight", 16032, 32064)         # rows of rank 1 of 8; the other rows are not read

    write_sharded(directory, infos, read=lambda name: tensor, max_shard_bytes=5 * 10**9)
    # model-00001-of-00004.safetensors … model.safetensors.index.json

Memory is one tensor either way. `safetensors.torch.save_file` holds a whole file's tensors, so writing is done here; the format is a
u64 header length, a JSON header with each tensor's place, and the data. Reading maps a file for the time of one tensor.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacp.checkpointing.model_weights import PretrainedError, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsFolder:
    """`tensors`: shape and dtype by name, from the files' headers. Raises PretrainedError naming the file."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path, expected in self._files().items():
            found = _headers(path)
            for name in found if expected is None else expected:
                if name not in found:
                    raise PretrainedError(f"{path} has no tensor {name}, which {INDEX} places there")
                self._file_of[name], self.tensors[name] = path, found[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor. What is not touched of the result is not read from disk."""
        with _open(self._file_of[name]) as file:
            return file.get_slice(name)[start : self.tensors[name].shape[0] if stop is None else stop]

    def _files(self) -> dict[Path, list[str] | None]:
        """Files with the tensors that the index expects in each; None: whatever is there."""
        if (self.directory / SINGLE).is_file():
            return {self.directory / SINGLE: None}
        try:
            weight_map = json.loads((self.directory / INDEX).read_text())["weight_map"]
        except FileNotFoundError:
            others = sorted(path.name for path in self.directory.glob("*.bin")) + sorted(
                path.name for path in self.directory.glob("*.pth")
            )
            hint = f"; {others[0]} is of another format: transformers' save_pretrained writes safetensors" if others else ""
            raise PretrainedError(f"{self.directory} has neither {SINGLE} nor {INDEX}{hint}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise PretrainedError(f"{self.directory / INDEX} is not an index of safetensors files: {error!r}") from error
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise PretrainedError(f"{self.directory / INDEX} places {name} outside the folder, in {file}")
            files.setdefault(self.directory / file, []).append(name)
        return files


def _open(path: Path):
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise PretrainedError(f"{path} is missing, and {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        raise PretrainedError(f"{path} is damaged or cut short: {error}") from error


def _headers(path: Path) -> dict[str, TensorInfo]:
    infos = {}
    with _open(path) as file:
        for name in file.keys():
            view = file.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise PretrainedError(
                    f"{path}: {name} is {view.get_dtype()}; {', '.join(DTYPES)} are known (quantized weights are not)"
                )
            infos[name] = TensorInfo(tuple(view.get_shape()), DTYPES[view.get_dtype()])
    return infos


def split_into_shards(infos: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `max_bytes`; a tensor larger than that is a run of its own.

    >>> info = TensorInfo((4,), torch.float32)
    >>> split_into_shards({"a": info, "b": info, "c": info}, 32)
    [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = []
    filled = 0
    for name, info in infos.items():
        if not shards or filled + info.bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.bytes
    return shards


def write_sharded(
    directory: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor], max_shard_bytes: int,
    report: Callable[[str], None] = lambda line: None,
) -> None:  # fmt: skip
    """Writes the tensors `infos` in files of at most `max_shard_bytes`, with an index when there are several.

    `read(name)` gives a tensor of the shape and dtype announced, one at a time. `report` is given a line a file.
    """
    shards = split_into_shards(infos, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        size = _write_file(directory / file, {name: infos[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
        report(f"{file}: {len(names)} tensors, {size / 1e9:.2f} GB")
    if len(shards) > 1:
        total = sum(info.bytes for info in infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> int:
    # Wide types first, so that every tensor lies at a multiple of its item size.
    order = sorted(infos, key=lambda name: -infos[name].dtype.itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        info = infos[name]
        places = [offset, offset + info.bytes]
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": places}
        offset += info.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = read(name)
            if (tuple(tensor.shape), tensor.dtype) != (infos[name].shape, infos[name].dtype):
                raise ValueError(f"{name} was announced as {infos[name]} and is {tuple(tensor.shape)}, {tensor.dtype}")
            _write_all(file, tensor.contiguous().view(torch.uint8).numpy())
        os.fsync(file.fileno())
    return offset


def _write_all(file, data) -> None:
    """A raw write takes at most 2 GiB at a time, and may take less."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]
