"""Whether the places a run reads and writes can serve it, before it takes any memory: a wrong one would show after hours of training.

    begin_from_pretrained(args)     # fills in --load and --finetune where --pretrained-checkpoint is where to start
    check_paths(args)       # every rank: --load holds what it should, --save is free or what --load goes on from
    check_logs(args)        # the first rank: --tensorboard-dir, --log-jsonl and their like can be written
    place_to_resume(args)   # "runs/b without --finetune": what --load of a run that goes on from this one's checkpoints is

Nothing that is made stays, so a --dry-run may ask too. Raises ArgumentError naming the flag, the place and one that works.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.checkpointing import folder


def begin_from_pretrained(args: argparse.Namespace) -> None:
    """Until --load holds a checkpoint to go on from, --pretrained-checkpoint is the --load of a --finetune.

    It may be a single checkpoint, of an older step. Refuses what could not be queued again.
    """
    if args.pretrained_checkpoint is None:
        return
    flag, given = f"--pretrained-checkpoint {args.pretrained_checkpoint}", Path(args.pretrained_checkpoint)
    source = given.absolute().parent if folder.is_checkpoint(given) else given
    for name in ("load", "save"):
        place = getattr(args, name)
        if place is not None and same_place(Path(place), source):
            free = _free_name(Path(place))
            raise ArgumentError(f"{flag} is also --{name}; this run needs a folder of its own: --load {free} --save {free} works")
    if args.save is not None and (args.load is None or not same_place(Path(args.load), Path(args.save))):
        raise ArgumentError(f"{flag} with --save {args.save} needs --load {args.save}, from which the same command goes on later")
    if args.load is not None and _holds_something(Path(args.load)):
        return
    if not _holds_something(source):
        raise ArgumentError(f"{flag} {_what_instead(given, flag)}; a folder that --save wrote works, or one of the checkpoints in it")
    args.load, args.finetune = str(source), True
    args.ckpt_step = int(given.absolute().name.removeprefix("iter_")) if source != given else None


def check_paths(args: argparse.Namespace) -> None:
    """--load and --save, which all ranks share: each finds the same."""
    if args.load is not None:
        _check_load(Path(args.load), args)
    if args.save is not None:
        check_folder("--save", Path(args.save))
        _check_not_anothers(Path(args.save), args)


def check_logs(args: argparse.Namespace) -> None:
    """For the rank that writes them."""
    if args.tensorboard_dir is not None:
        check_folder("--tensorboard-dir", Path(args.tensorboard_dir))
    if args.profile_dir is not None:
        check_folder("--profile-dir", Path(args.profile_dir))
    for flag, file, example in (
        ("--log-jsonl", args.log_jsonl, "log.jsonl"),
        ("--heartbeat-file", args.heartbeat_file, "heartbeat.json"),
        ("--rehearse-json", args.rehearse_json, "rehearsal.json"),
        ("--record-memory-history", args.record_memory_history, "memory.pickle"),
    ):
        if file is not None:
            check_file(flag, Path(file), example)


def _check_load(load: Path, args: argparse.Namespace) -> None:
    """Starting anew is right only where this run will save: then the next one goes on from there."""
    if folder.is_checkpoint(load):
        raise ArgumentError(
            f"--load {load} is a single checkpoint; its folder works: --load {load.absolute().parent} takes the one saved last, "
            f"with --ckpt-step {int(load.absolute().name.removeprefix('iter_'))} this one"
        )
    if _holds_something(load):
        found = sorted(folder.complete_checkpoints(load))
        if args.ckpt_step is not None and args.ckpt_step not in found:
            there = "there is none"
            if found:
                there = f"those of {', '.join(map(str, found))} are there, and without --ckpt-step that of {_newest(load)} is taken"
            raise ArgumentError(f"--ckpt-step {args.ckpt_step}: --load {load} holds no checkpoint of this step; {there}")
        return
    what = _what_instead(load, f"--load {load}")
    if args.finetune or args.ckpt_step is not None:
        flag = "--finetune" if args.finetune else f"--ckpt-step {args.ckpt_step}"
        raise ArgumentError(f"--load {load} {what}, and {flag} starts from one; a folder that --save wrote works")
    starts_here = args.load_hf is not None or (args.save is not None and same_place(load, Path(args.save)))
    if not starts_here:
        raise ArgumentError(
            f"--load {load} {what}; a folder that --save wrote works. To start from initial weights, leave --load out, or give "
            f"the same folder to --save, and the same command goes on from there later: --save {load}"
        )


def _what_instead(place: Path, said: str) -> str:
    """What is there instead of checkpoints; `said` is how the place was given. Refuses a Hugging Face folder, whose flag is another."""
    if (place / "config.json").is_file() or any(place.glob("*.safetensors")):
        raise ArgumentError(f"{said} is a Hugging Face folder; --load-hf {place} works")
    return "holds no checkpoint" if place.is_dir() else "is a file" if place.exists() else "does not exist"


def _check_not_anothers(save: Path, args: argparse.Namespace) -> None:
    """Checkpoints that this run does not go on from would fall to --ckpt-keep, or be replaced by one of the same step."""
    same = args.load is not None and same_place(save, Path(args.load))
    if same and args.finetune:
        raise ArgumentError(
            f"--save {save} is the folder of --load: with --finetune this run starts at step 0, and its checkpoints would go among "
            f"those that it takes its weights from; a folder of its own works: --save {_free_name(save)}"
        )
    found = list(folder.complete_checkpoints(save))
    if found and args.pretrained_checkpoint is not None and args.finetune:  # when it was decided what to start from there was none
        raise ArgumentError(
            f"--save {save}: meanwhile another run saved checkpoints up to step {max(found)} there; the same command, started again, "
            "goes on from them"
        )
    others = (path.name for path in save.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name) and not folder.is_checkpoint(path))
    other = next(others, None) or (folder.TRACKER if not found and not same and (save / folder.TRACKER).exists() else None)
    if other:
        raise ArgumentError(
            f"--save {save} holds {other}, but not as this program saves it: another program's, or damaged. Move it away, or take a "
            f"folder of its own: --save {_free_name(save)}"
        )
    if found and not same:
        raise ArgumentError(
            f"--save {save} holds checkpoints up to step {max(found)} that this run does not go on from, and would replace; "
            f"--load {place_to_resume(args)} goes on from there, and a folder of its own works too: --save {_free_name(save)}"
        )


def _newest(load: Path) -> int:
    """The step saved last."""
    return list(folder.complete_checkpoints(load))[-1]


def place_to_resume(args: argparse.Namespace) -> str | None:
    """What the --load of a run is that goes on from the checkpoints of --save; None: nothing is saved."""
    if args.save is None:
        return None
    if args.pretrained_checkpoint is not None:  # the same command goes on
        return args.save
    given = {"--finetune": args.finetune, "--no-load-optim": args.no_load_optim, "--ckpt-step": args.ckpt_step is not None}
    once = [flag for flag, is_given in given.items() if is_given]  # given again they would undo what was trained since
    return f"{args.save} without {' and '.join(once)}" if once else args.save


def abandoned_steps(args: argparse.Namespace) -> list[int]:
    """Steps of checkpoints saved after that of --ckpt-step in the folder in which this run saves too, and so replaces them."""
    if args.ckpt_step is None or args.save is None or not same_place(Path(args.save), Path(args.load)):
        return []
    saved_in_turn = list(folder.complete_checkpoints(Path(args.save)))
    return saved_in_turn[saved_in_turn.index(args.ckpt_step) + 1 :]


def check_file(flag: str, path: Path, example: str) -> None:
    """`path` is a file that can be written, or can be made."""
    if path.is_dir():
        raise ArgumentError(f"{flag} {path} is a folder; a file in it works: {flag} {path / example}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ArgumentError(f"{flag} {path} cannot be written; another file works")
    check_folder(flag, path.parent, shown=path)


def check_folder(flag: str, path: Path, shown: Path | None = None) -> None:
    """`path` is a folder that can be written, or can be made."""
    shown, existing = shown or path, path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ArgumentError(f"{flag} {shown}: {existing} is a file, not a folder; another place works")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ArgumentError(f"{flag} {shown}: no file can be made in {existing} (read-only, or not yours); another place works")
    try:
        tempfile.TemporaryFile(dir=existing).close()  # permissions are not all: file systems have other rules, and root has none
    except OSError as error:
        raise ArgumentError(f"{flag} {shown}: no file can be made in {existing} ({error.strerror}); another place works") from error


def _holds_something(load: Path) -> bool:
    """A checkpoint, or traces of one, which loading explains."""
    return bool(folder.complete_checkpoints(load)) or (load / folder.TRACKER).exists()


def same_place(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _free_name(path: Path) -> Path:
    number = 2
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free
