"""Saving and loading the sharded training state: model, optimizer, trainer state, random generators.

    save_checkpoint("ckpt", 10, model, optimizer, {"iteration": 10, "consumed_samples": 80, ...}, keep=2)

    if latest_iteration("ckpt") is not None:
        trainer_state = load_checkpoint("ckpt", model, optimizer)  # {"iteration": 10, "consumed_samples": 80, ...}

Every rank of the job calls them. A rank writes its own shards, so 8 ranks write Llama3-8B (fp32 weights and two
moments, 96 GB) as 12 GB each; a load may be on another number of ranks or another layout, each rank reading the
parts of the files that its shards need. `--save` must be a file system that all hosts share.

`folder` tells how a checkpoint is complete or absent at any moment. A failure on any rank is a CheckpointError on
every rank, with the checkpoints saved before untouched.

The flags of the run, not the checkpoint, give the optimizer's settings (learning rate, betas, weight decay).
Random generators: a load on as many ranks as saved restores each rank's; on another number they are seeded from
(seed of rank 0 when saved, iteration, rank). Training draws no random numbers (see `random_state`).
"""

import json
import os
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from megacp.checkpointing import folder
from megacp.checkpointing.agreement import RankFailure, agreement_group, describe_error, on_first_rank, together
from megacp.checkpointing.compatibility import first_mismatch
from megacp.checkpointing.folder import DamagedFile, Manifest
from megacp.checkpointing.random_state import random_state, restore_random_state, seed_random_state

METADATA = ".metadata"
TRAINER_STATE = "trainer_state.json"
# Names of the entries in torch's distributed checkpoint; the parameter's name follows, as in "optimizer.norm.exp_avg".
MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
BYTES_PER_ENTRY = 4096  # headers, and the entry's lines in the metadata
MARGIN = 1.02  # over the bytes that will be written, for the file system's own blocks


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. The text names the flag, the place and what can be done."""


class _DoesNotFit(RankFailure):
    """The checkpoint is of another model."""


def latest_iteration(directory: str | os.PathLike) -> int | None:
    """Iteration of the checkpoint saved last; None when nothing was ever saved there. For one rank, any.

    Raises CheckpointError when the tracker file tells of a save and no complete checkpoint is there.
    """
    iterations = list(folder.complete_checkpoints(Path(directory)))
    if not iterations and (Path(directory) / folder.TRACKER).exists():
        raise CheckpointError(
            f"--load {directory}: {folder.TRACKER} tells of a checkpoint, but there is no folder iter_* with a "
            f"{folder.MANIFEST}. To start afresh, give a directory that is empty or does not exist"
        )
    return iterations[-1] if iterations else None


def save_checkpoint(
    directory: str | os.PathLike,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer_state: dict,
    keep: int | None = None,
    abandoned: Collection[int] = (),
) -> Path:
    """Writes `directory/iter_<iteration>` and returns its path when it is on disk, complete, for every rank.

    trainer_state: anything JSON can hold, equal on all ranks (rank 0's is saved); tuples come back as lists.
    keep: how many of the newest checkpoints stay, this one included; None or 0: all. Older ones are removed only
    when this one is complete, and before them those of `abandoned` iterations.
    Raises CheckpointError on every rank when any rank fails.
    """
    directory = Path(directory)
    rank = dist.get_rank()
    needed = free = None
    with agreement_group() as group:
        try:
            working = on_first_rank(group, lambda: folder.begin(directory, iteration))
            entries: dict = {}
            needed = sum(together(group, lambda: _collect(entries, model, optimizer, rank)))
            free = on_first_rank(group, lambda: shutil.disk_usage(directory).free)
            if needed > free:
                raise RankFailure("too little space before anything was written")
            dcp.save(entries, storage_writer=Writer(working), process_group=group)
            files: dict[str, folder.FileRecord] = {}
            for records in together(group, lambda: _record_files(working, rank, trainer_state)):
                files |= records
            manifest = Manifest(iteration, dist.get_world_size(), files)
            final = on_first_rank(group, lambda: folder.publish(directory, manifest))
        except (RankFailure, CheckpointException) as error:
            outcome = on_first_rank(group, lambda: _clean_up(directory, iteration))
            raise CheckpointError(_save_message(directory, iteration, error, needed, free, outcome)) from error
        on_first_rank(group, lambda: _prune(directory, keep, iteration, abandoned))  # the others wait for a slow removal here
    return final


def load_checkpoint(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    iteration: int | None = None,
    generators: bool = True,
) -> dict:
    """Fills model and optimizer, in place, from the checkpoint saved last or from that of `iteration`.

    Returns the trainer state. Gradients are dropped. `optimizer` None leaves its state where it is, `generators` False the random
    generators; a checkpoint of converted weights (`tools/convert_checkpoint.py`) holds neither. All files are verified first,
    their checksums spread over the ranks; a model that does not fit is refused before it is touched.
    Raises CheckpointError on every rank when any rank fails or when the directory has no such checkpoint.
    """
    directory = Path(directory)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = None
    with agreement_group() as group:
        try:
            path = on_first_rank(group, lambda: _find(directory, iteration))
            manifest = on_first_rank(group, lambda: Manifest.read(path))
            saved = on_first_rank(group, lambda: _saved_shapes(path, manifest))
            if f"{RANDOM}seed" not in saved:  # of no run: weights that were converted
                optimizer = None
            entries: dict = {}
            together(group, lambda: _collect(entries, model, optimizer, rank))
            _refuse_mismatch(saved, _shapes_by_entry(entries))
            together(group, lambda: _verify_files(path, manifest, rank, world_size))
            _expect_random_state(entries, saved, manifest, rank, generators)
            dcp.load(entries, storage_reader=dcp.FileSystemReader(path), process_group=group)
            together(group, lambda: _apply(entries, model, optimizer, manifest, rank))
            return on_first_rank(group, lambda: json.loads((path / TRAINER_STATE).read_bytes()))
        except (RankFailure, CheckpointException) as error:
            place = f"--load {directory}: " + (f"{path.name}: " if path is not None else "")
            older_may_do = not isinstance(error, _DoesNotFit)
            advice = on_first_rank(group, lambda: _advice(directory, path) if older_may_do else "")
            raise CheckpointError(f"{place}{_reason(error)}{advice}") from error


class Writer(dcp.FileSystemWriter):
    """Reports the system's error (no space, no permission) where torch reports its zip writer's trouble with it."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            system_error = _system_error_behind(error)
            if system_error is None:
                raise
            raise system_error from error


def _system_error_behind(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _collect(entries: dict, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int) -> int:
    """Puts the live tensors of the state into `entries`, not copies; returns the bytes this rank would write."""
    for name, tensor in get_model_state_dict(model).items():
        entries[MODEL + name] = tensor
    if optimizer is not None:
        _make_optimizer_state(model, optimizer)
        for name, state in get_optimizer_state_dict(model, optimizer)["state"].items():
            for key, value in state.items():
                entries[f"{OPTIMIZER}{name}.{key}"] = value
    entries[f"{RANDOM}{rank}"] = random_state()
    entries[f"{RANDOM}seed"] = torch.tensor([torch.initial_seed() % 2**63])
    local = [value.to_local() if isinstance(value, DTensor) else value for value in entries.values()]
    return int(MARGIN * sum(tensor.numel() * tensor.element_size() + BYTES_PER_ENTRY for tensor in local))


def _make_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that has not stepped its zero state. torch makes it by a step of length 0, and counts that."""
    if optimizer.state:
        return
    optimizer.zero_grad(set_to_none=True)  # torch would take gradients as a sign that the optimizer is stateless
    get_optimizer_state_dict(model, optimizer)
    for state in optimizer.state.values():
        state["step"].zero_()


def _record_files(working: Path, rank: int, trainer_state: dict) -> dict[str, folder.FileRecord]:
    """Reads back what this rank wrote; rank 0 also wrote the metadata and writes the trainer state here."""
    names = [path.name for path in working.glob(f"__{rank}_*.distcp")]
    if rank == 0:
        folder.write_durably(working / TRAINER_STATE, json.dumps(trainer_state, indent=1))
        names += [METADATA, TRAINER_STATE]
    return {name: folder.record_file(working / name) for name in names}


def _prune(directory: Path, keep: int | None, iteration: int, abandoned: Collection[int]) -> None:
    """The new checkpoint is safe, so an old one that cannot be removed is worth a warning, not the run."""
    try:
        folder.prune(directory, keep, iteration, abandoned)
    except OSError as error:
        warnings.warn(f"--save {directory}: an old checkpoint could not be removed: {error}", stacklevel=3)


def _clean_up(directory: Path, iteration: int) -> str:
    """Removes the partial folder and says how things stand."""
    working = directory / (folder.folder_name(iteration) + folder.INCOMPLETE)
    outcome = ""
    try:
        if working.exists():
            shutil.rmtree(working)
            outcome = "The partial folder was removed. "
    except OSError as error:
        outcome = f"The partial folder {working.name} could not be removed ({describe_error(error)}). "
    try:
        good = list(folder.complete_checkpoints(directory).values())
    except OSError as error:
        return outcome + f"Nothing is known of earlier checkpoints ({describe_error(error)})"
    if good:
        return outcome + f"The last good checkpoint, {good[-1].name}, is intact"
    return outcome + "There is no earlier checkpoint in this directory"


def _save_message(directory, iteration, error, needed, free, outcome) -> str:
    space = "" if needed is None else f" It needs {_size(needed)}"
    space += "." if space and free is None else f"; {_size(free)} were free before." if space else ""
    return f"--save {directory}: {folder.folder_name(iteration)} was not saved: {_reason(error)}.{space} {outcome}"


def _reason(error: BaseException) -> str:
    """Without torch's traceback of every rank: the exception is the cause of the one raised and keeps it."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {describe_error(cause)}"
    return str(error)


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _find(directory: Path, iteration: int | None) -> Path:
    found = folder.complete_checkpoints(directory)
    if not found:
        raise RankFailure("there is no complete checkpoint in it")
    if iteration is None:
        return list(found.values())[-1]
    if iteration not in found:
        raise RankFailure(f"there is no complete checkpoint of iteration {iteration}; there are {sorted(found)}")
    return found[iteration]


def _verify_files(path: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """This rank's share of the files, which is one of similar bytes for each rank."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    for name in by_size[rank::world_size]:
        folder.verify_file(path / name, manifest.files[name])


def _advice(directory: Path, path: Path | None) -> str:
    """Names the newest older checkpoint with all files of the right size."""
    candidates = list(folder.complete_checkpoints(directory).values())
    older = candidates[: candidates.index(path)] if path in candidates else []
    for candidate in reversed(older):
        try:
            sizes = {name: record.bytes for name, record in Manifest.read(candidate).files.items()}
            if all((candidate / name).stat().st_size == size for name, size in sizes.items()):
                step = int(candidate.name.removeprefix("iter_").removesuffix(folder.REPLACED))
                return f". {candidate.name} is older and intact: --ckpt-step {step} takes it, or move {path.name} away"
        except (DamagedFile, OSError):
            continue  # not intact, so not the one to name
    return ""


def _saved_shapes(path: Path, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Reads torch's metadata, verified first because it is a pickle."""
    folder.verify_file(path / METADATA, manifest.files[METADATA])
    return _shapes_by_entry(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def _shapes_by_entry(entries: dict) -> dict[str, tuple[int, ...]]:
    """Of tensors, or of torch's metadata of tensors."""
    return {name: tuple(getattr(value, "shape", getattr(value, "size", ()))) for name, value in entries.items()}


def _refuse_mismatch(saved: dict, wanted: dict) -> None:
    mismatch = first_mismatch(_with_prefix(saved, MODEL), _with_prefix(wanted, MODEL))
    if mismatch is not None:
        raise _DoesNotFit(mismatch)
    for name in _with_prefix(wanted, OPTIMIZER):
        if OPTIMIZER + name not in saved:
            raise RankFailure(f"{METADATA} has no optimizer state {name}: the checkpoint holds weights alone; "
                              "--no-load-optim takes them")


def _with_prefix(shapes: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _expect_random_state(entries: dict, saved: dict, manifest: Manifest, rank: int, wanted: bool) -> None:
    """Makes room for the state saved by this rank, or leaves it out. Converted weights come with none."""
    if not wanted or f"{RANDOM}seed" not in saved:
        del entries[f"{RANDOM}{rank}"], entries[f"{RANDOM}seed"]
    elif manifest.world_size == dist.get_world_size():
        entries[f"{RANDOM}{rank}"] = torch.empty(saved[f"{RANDOM}{rank}"], dtype=torch.uint8)
    else:
        del entries[f"{RANDOM}{rank}"]


def _apply(entries: dict, model: nn.Module, optimizer, manifest: Manifest, rank: int) -> None:
    """Hands the loaded tensors, most of which are the model's own, to model, optimizer and generators."""
    set_model_state_dict(model, _with_prefix(entries, MODEL))
    if optimizer is not None:
        current = get_optimizer_state_dict(model, optimizer)
        for name, state in current["state"].items():
            for key in state:
                state[key] = entries[f"{OPTIMIZER}{name}.{key}"]
        set_optimizer_state_dict(model, optimizer, current)
        optimizer.zero_grad(set_to_none=True)
    if f"{RANDOM}{rank}" in entries:
        restore_random_state(entries[f"{RANDOM}{rank}"])
    elif f"{RANDOM}seed" in entries:
        seed_random_state(int(entries[f"{RANDOM}seed"]), manifest.iteration, rank)
