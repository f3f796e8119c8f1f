"""A Hugging Face folder as weights of ours: names translated, everything checked against its config.json, read in parts.

    weights = HuggingFaceWeights("Llama-3.1-8B")
    weights.config.num_layers                           # 32
    weights.read("layers.3.k_proj", 128, 256)           # [128, 4096] of model.layers.3.self_attn.k_proj.weight

Shapes and the order of heads are Hugging Face's own, so a weight is never changed on the way in or out.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from megacp.checkpointing.huggingface_config import model_config
from megacp.checkpointing.model_weights import PretrainedError, TensorInfo, check_shapes, weight_shapes
from megacp.checkpointing.safetensors_folder import SafetensorsFolder
from megacp.model.config import ModelConfig

EMBEDDING, LM_HEAD = "embedding.weight", "output_head.lm_head"
TOP_NAMES = {EMBEDDING: "model.embed_tokens.weight", "output_head.norm": "model.norm.weight", LM_HEAD: "lm_head.weight"}
# Buffers that old conversions saved; they follow from config.json.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def hugging_face_name(name: str) -> str:
    """
    >>> hugging_face_name("layers.3.k_proj"), hugging_face_name("layers.0.input_layernorm")
    ('model.layers.3.self_attn.k_proj.weight', 'model.layers.0.input_layernorm.weight')
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, number, leaf = name.split(".")
    block = "mlp." if leaf in ("gate_proj", "up_proj", "down_proj") else "" if leaf.endswith("layernorm") else "self_attn."
    return f"model.layers.{number}.{block}{leaf}.weight"


class HuggingFaceWeights:
    """`config`, and `tensors` by our names. Raises PretrainedError when folder, config.json or a tensor does not fit."""

    def __init__(self, directory: Path | str, config: ModelConfig | None = None):
        """`config` stands in for that of config.json where only rotary positions differ."""
        self.directory = Path(directory)
        self.config = config or model_config(directory)
        self._folder = SafetensorsFolder(directory)
        shapes = weight_shapes(self.config)
        found = {name: info.shape for name, info in self._folder.tensors.items() if not DERIVED.fullmatch(name)}
        lm_head = TOP_NAMES[LM_HEAD]
        self._tied_copy = LM_HEAD not in shapes and found.get(lm_head) == shapes[EMBEDDING]
        if self._tied_copy:
            del found[lm_head]
        check_shapes(self.directory, found, {hugging_face_name(name): shape for name, shape in shapes.items()}, "config.json")
        self.tensors: dict[str, TensorInfo] = {name: self._folder.tensors[hugging_face_name(name)] for name in shapes}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a weight; the others are not read."""
        rows = self._folder.read(hugging_face_name(name), start, stop)
        if name == EMBEDDING and self._tied_copy and not torch.equal(rows, self._folder.read(TOP_NAMES[LM_HEAD], start, stop)):
            raise PretrainedError(
                f"{self.directory}: lm_head.weight is not equal to model.embed_tokens.weight, though config.json says "
                f'"tie_word_embeddings": true; false keeps both'
            )
        return rows
