"""The weights of a checkpoint of ours for one process without process groups: read one by one, or written alone.

    saved = SavedWeights("checkpoints")                          # the newest; the files' checksums are verified
    saved.config, saved.iteration                                # the ModelConfig travels in trainer_state.json
    saved.read("layers.3.k_proj")                                # whole, whatever the number of ranks that wrote it

    save_weights("converted", config, infos, read=lambda name: tensor, source="Llama-3.1-8B")

What `save_weights` writes is iteration 0 with weights alone: `--load` starts a run from it with a fresh optimizer. Writing takes the
memory of one tensor, reading that of two or three copies of it, which torch makes.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megacp.checkpointing import folder
from megacp.checkpointing.agreement import RankFailure
from megacp.checkpointing.distributed import METADATA, MODEL, TRAINER_STATE, CheckpointError, Writer
from megacp.checkpointing.folder import Manifest
from megacp.checkpointing.model_weights import TensorInfo, check_shapes, weight_shapes
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig


def config_to_json(config: ModelConfig) -> dict:
    return dataclasses.asdict(config)


def config_from_json(values: dict) -> ModelConfig:
    scaling = values["rope_scaling"]
    return ModelConfig(**values | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})


class SavedWeights:
    """The weights of one checkpoint. `tensors`: shape and dtype by name. Raises CheckpointError when it is absent or damaged."""

    def __init__(self, directory: Path | str, iteration: int | None = None):
        """`iteration` None: the checkpoint saved last."""
        self.directory = Path(directory)
        found = folder.complete_checkpoints(self.directory)
        if not found or (iteration is not None and iteration not in found):
            which = f"of iteration {iteration}; there are {sorted(found)}" if found else "in it"
            if folder.is_checkpoint(self.directory):
                step = int(self.directory.absolute().name.removeprefix("iter_"))
                which = f"in it, for it is one itself; {self.directory.absolute().parent} with --iteration {step} works"
            raise CheckpointError(f"{directory}: there is no complete checkpoint {which}")
        path = list(found.values())[-1] if iteration is None else found[iteration]
        try:
            manifest = Manifest.read(path)
            for name, record in manifest.files.items():
                folder.verify_file(path / name, record)
        except RankFailure as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.iteration = manifest.iteration
        state = json.loads((path / TRAINER_STATE).read_bytes())
        if "model_config" not in state:
            raise CheckpointError(f"{path / TRAINER_STATE} does not say what model it is: it was saved by an older version")
        self.config = config_from_json(state["model_config"])
        self._reader = _Reader(path)
        entries = self._reader.metadata.state_dict_metadata
        self.tensors = {
            name.removeprefix(MODEL): TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(MODEL)
        }
        check_shapes(path, {name: info.shape for name, info in self.tensors.items()}, weight_shapes(self.config), TRAINER_STATE)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        entries = {MODEL + name: torch.empty(info.shape, dtype=info.dtype)}
        with _in_one_process():
            dcp.load(entries, storage_reader=self._reader, no_dist=True)
        return entries[MODEL + name]


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, which is large when many ranks saved."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args, **kwargs):
        return self.metadata


def save_weights(
    directory: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor], source: str
) -> Path:
    """Writes `directory/iter_0000000` and returns it. `read(name)` gives a tensor as announced in `tensors`, one at a time."""
    working = folder.begin(directory, 0)
    entries = {MODEL + name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in tensors.items()}
    # A file for each tensor, because torch keeps the tensors of a file until its end.
    writer = Writer(working, single_file_per_rank=False)
    try:
        with _in_one_process():
            dcp.save(entries, storage_writer=writer, planner=_LazyPlanner(read), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error
    state = {"iteration": 0, "consumed_samples": 0, "model_config": config_to_json(config), "converted_from": source}
    folder.write_durably(working / TRAINER_STATE, json.dumps(state, indent=1))
    names = [path.name for path in working.glob("*.distcp")] + [METADATA, TRAINER_STATE]
    return folder.publish(directory, Manifest(0, 1, {name: folder.record_file(working / name) for name in names}))


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Plans with tensors that have no data and fetches each when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self._read = read

    def lookup_object(self, index):
        return self._read(index.fqn.removeprefix(MODEL))


@contextmanager
def _in_one_process() -> Iterator[None]:
    """torch warns that it takes the process for the only one, which is what it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*", category=UserWarning)
        yield
