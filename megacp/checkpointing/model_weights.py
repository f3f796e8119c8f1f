"""What every format of weights is held against: the names and shapes of a model's weights.

    weight_shapes(preset("llama3-8b"))["layers.3.k_proj"]        # (1024, 4096)

A reader of a format has `config`, `tensors` (a TensorInfo by name) and `read(name)`, whole or, for some, in rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megacp.model.config import ModelConfig
from megacp.model.llama import Llama

Shape = tuple[int, ...]


class PretrainedError(ValueError):
    """A folder of weights that cannot be used. The text names the file, the setting or tensor, and what would do."""


@dataclass(frozen=True)
class TensorInfo:
    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every weight by its name, in the model's order."""
    return {name: tuple(weight.shape) for name, weight in Llama(config, device="meta").named_parameters()}


def check_shapes(place: Path | str, found: Mapping[str, Shape], wanted: Mapping[str, Shape], source: str) -> None:
    """Raises PretrainedError naming the first tensor that is missing, of another shape or too many. `source` says what wants it."""
    for name, shape in wanted.items():
        if name not in found:
            raise PretrainedError(f"{place}: tensor {name} {list(shape)} is missing; {source} asks for it")
        if found[name] != shape:
            raise PretrainedError(f"{place}: tensor {name} is {list(found[name])}, and {list(shape)} by {source}")
    for name, shape in found.items():
        if name not in wanted:
            raise PretrainedError(f"{place}: tensor {name} {list(shape)} is not part of the model that {source} describes")
