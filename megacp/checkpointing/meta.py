"""Meta's original folders: `params.json` and the model-parallel shards `consolidated.NN.pth`, read as weights of ours.

    weights = MetaWeights("Llama-2-13b")                # consolidated.00.pth and consolidated.01.pth
    weights.read("layers.0.q_proj")                     # [5120, 5120], both halves, rows in Hugging Face's order

Two things differ from ours but for names:

    Each file holds a part of every matrix, of the rows (q, k, v, gate, up, output) or of the columns (o, down); of the embedding
    the columns in Llama 2 and the rows in Llama 3.
    Rotary positions turn the neighbours (0, 1), (2, 3), … of a head, ours the halves (0, D/2), (1, D/2 + 1), …: within each head
    the rows of q and k come in the order 0, 2, 4, … 1, 3, 5, …

`params.json` does not say everything. The context is the one the model was published with: 4,096 tokens for Llama 2, 8,192 for
Llama 3 (told by its rotary base of 500,000), 131,072 where `use_scaled_rope` is set (3.1, 3.2). The scaling factor is 8, or 32 for
the small models of 3.2, whose output weights equal the embedding. `assumptions` says so, for the person.
"""

import json
import pickle
from pathlib import Path

import torch
from torch import Tensor

from megacp.checkpointing.huggingface import EMBEDDING, LM_HEAD
from megacp.checkpointing.model_weights import PretrainedError, TensorInfo, check_shapes, weight_shapes
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig

PARAMS = "params.json"
TOP_NAMES = {EMBEDDING: "tok_embeddings.weight", "output_head.norm": "norm.weight", LM_HEAD: "output.weight"}
LAYER_NAMES = {
    "input_layernorm": "attention_norm", "q_proj": "attention.wq", "k_proj": "attention.wk", "v_proj": "attention.wv",
    "o_proj": "attention.wo", "post_attention_layernorm": "ffn_norm", "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3", "down_proj": "feed_forward.w2",
}  # fmt: skip
DERIVED = "rope.freqs"  # a buffer that some files hold
KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
    "use_scaled_rope", "max_seq_len", "max_batch_size", "model_parallel_size",
}  # fmt: skip


def meta_name(name: str) -> str:
    """
    >>> meta_name("layers.3.gate_proj")
    'layers.3.feed_forward.w1.weight'
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, number, leaf = name.split(".")
    return f"layers.{number}.{LAYER_NAMES[leaf]}.weight"


def half_split_rows(w_od: Tensor, heads: int) -> Tensor:
    """Rows of q or k of all heads, from interleaved pairs to halves."""
    return w_od.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class MetaWeights:
    """`config`, and `tensors` by our names. Raises PretrainedError when a file, a setting or a tensor does not fit."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._files = _shard_files(self.directory)
        shards = [_load(path) for path in self._files]
        params = _read_params(self.directory)
        self.config, self.assumptions = _config(params, shards, self.directory)
        del shards[1:]
        shapes = weight_shapes(self.config)
        found = {name: self._whole_shape(name, tensor.shape) for name, tensor in shards[0].items() if name != DERIVED}
        if LM_HEAD not in shapes:
            found.pop(TOP_NAMES[LM_HEAD], None)
        check_shapes(self.directory, found, {meta_name(name): shape for name, shape in shapes.items()}, PARAMS)
        self.tensors = {name: TensorInfo(shape, shards[0][meta_name(name)].dtype) for name, shape in shapes.items()}

    def read(self, name: str) -> Tensor:
        """A whole weight, its parts taken from all files."""
        parts = [_load(path)[meta_name(name)] for path in self._files]
        dim = self._split_dim(meta_name(name), parts[0].shape)
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "q_proj":
            return half_split_rows(whole, self.config.num_attention_heads)
        return half_split_rows(whole, self.config.num_query_groups) if leaf == "k_proj" else whole

    def _split_dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Dimension of which each file holds a part; None: the file holds all."""
        if len(self._files) == 1 or len(shape) == 1:
            return None
        if name == TOP_NAMES[EMBEDDING]:
            return 1 if shape[1] != self.config.hidden_size else 0
        return 1 if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")) else 0

    def _whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = self._split_dim(name, shape)
        return tuple(size * len(self._files) if number == dim else size for number, size in enumerate(shape))


def _shard_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("consolidated.*.pth"))
    if not files:
        raise PretrainedError(f"{directory} has no consolidated.00.pth; a folder that Meta distributes has one")
    for number, path in enumerate(files):
        if path.name != f"consolidated.{number:02}.pth":
            raise PretrainedError(f"{directory / f'consolidated.{number:02}.pth'} is missing, and {path.name} is there")
    return files


def _load(path: Path) -> dict[str, Tensor]:
    """Maps the file: data is read when touched."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise PretrainedError(f"{path} is damaged, cut short or no file of weights: {str(error).splitlines()[0]}") from error


def _read_params(directory: Path) -> dict:
    try:
        params = json.loads((directory / PARAMS).read_text())
    except (OSError, ValueError) as error:
        raise PretrainedError(f"{directory / PARAMS} cannot be read: {error}") from error
    unknown = sorted(set(params) - KNOWN_PARAMS)
    if unknown:
        raise PretrainedError(f'{directory / PARAMS}: "{unknown[0]}": {params[unknown[0]]} is not known here')
    missing = sorted({"dim", "n_layers", "n_heads", "norm_eps"} - set(params))
    if missing:
        raise PretrainedError(f'{directory / PARAMS} has no "{missing[0]}"')
    return params


def _config(params: dict, shards: list[dict], directory: Path) -> tuple[ModelConfig, list[str]]:
    """Widths that params.json leaves out come from the shapes of the tensors."""
    first, count = shards[0], len(shards)
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in first:
            raise PretrainedError(f"{directory / 'consolidated.00.pth'}: tensor {name} is missing")
    rows, columns = first["tok_embeddings.weight"].shape
    hidden, heads = params["dim"], params["n_heads"]
    embeddings_equal = all(
        "output.weight" not in shard or _equal(shard["output.weight"], shard["tok_embeddings.weight"]) for shard in shards
    )
    theta = float(params.get("rope_theta", 10000.0))
    scaled = bool(params.get("use_scaled_rope", False))
    factor = 32.0 if embeddings_equal else 8.0
    context = 131072 if scaled else 8192 if theta == 500000.0 else 4096
    config = ModelConfig(
        name=directory.resolve().name, num_layers=params["n_layers"], hidden_size=hidden,
        ffn_hidden_size=first["layers.0.feed_forward.w1.weight"].shape[0] * count, num_attention_heads=heads,
        num_query_groups=params.get("n_kv_heads") or heads, kv_channels=hidden // heads,
        vocab_size=rows * count if columns == hidden else rows, max_position_embeddings=context, rotary_base=theta,
        rope_scaling=RopeScaling("llama3", factor, 8192) if scaled else None, norm_epsilon=float(params["norm_eps"]),
        qk_layernorm=False, untie_embeddings_and_output_weights=not embeddings_equal,
    )  # fmt: skip
    assumptions = [f"{PARAMS} does not give the context: taken as {context:,} tokens"]
    if scaled:
        assumptions.append(f"{PARAMS} does not give the factor of use_scaled_rope: taken as {factor:g} over 8,192 tokens")
    return config, assumptions


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
