#!/usr/bin/env python3
"""Convert a model between Hugging Face, Meta's original folders and checkpoints of this project, a tensor at a time.

    python tools/convert_checkpoint.py --from hf --to megacp --input Llama-3.1-8B --output checkpoints/start
    torchrun … pretrain_llama.py --load-hf Llama-3.1-8B …                # the same start without a conversion

    python tools/convert_checkpoint.py --from megacp --to hf --input checkpoints/run --output trained --dtype bf16
    python tools/convert_checkpoint.py --from meta --to hf --input Llama-2-7b --output Llama-2-7b-hf

For a longer context, by a larger rotary base or by YaRN; the config.json written says so:

    python tools/convert_checkpoint.py --from hf --to hf --input Llama-3.1-8B --output Llama-3.1-8B-1M \\
        --extend-context 1048576 --rope-scaling-type yarn --rope-beta-fast 4

Llama 2, 3, 3.1, 3.2 and dense Qwen3; what is not known is refused by name. Weights keep their dtype unless --dtype says another,
and their bytes where the dtype stays. Tokenizer files, generation_config.json and licences go along. Memory: up to three copies of
the largest tensor. The output appears whole, under its name, at the end; an output that exists, or that another conversion is
writing, is never touched. Reading `megacp` takes the newest checkpoint of the folder, of any number of ranks, or that of
--iteration.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megacp.argument_checks import ArgumentError, check_rope_scaling
from megacp.arguments import COUNT, HelpFormatter, add_rope_flags, rope_scaling_from_args
from megacp.checkpointing.distributed import CheckpointError
from megacp.checkpointing.huggingface import HuggingFaceWeights, hugging_face_name
from megacp.checkpointing.huggingface_config import CONFIG, config_to_hugging_face, read_config
from megacp.checkpointing.meta import MetaWeights
from megacp.checkpointing.model_weights import PretrainedError, TensorInfo
from megacp.checkpointing.safetensors_folder import write_sharded
from megacp.checkpointing.weights import SavedWeights, save_weights
from megacp.file_lock import Locked, lock_file
from megacp.model.config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HF_FILES = "huggingface"  # folder beside the checkpoint that keeps config.json and the tokenizer for the way back
COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
              "chat_template*", "LICENSE*", "USE_POLICY*", "NOTICE*")  # fmt: skip
INCOMPLETE, LOCK = ".incomplete", ".incomplete.lock"  # behind the name of --output, while it is written
SPACE_MARGIN = 2**24  # bytes beside the weights: headers, tokenizer, the file system's own
USAGE_ERROR, RUN_ERROR = 2, 1

Weights = HuggingFaceWeights | MetaWeights | SavedWeights


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    output = args.output.resolve()
    try:
        check_free(args.output)
        started = time.monotonic()
        weights = open_weights(args)
        config = extended(weights.config, args)
        tensors = {name: TensorInfo(info.shape, DTYPES.get(args.dtype, info.dtype)) for name, info in weights.tensors.items()}
        size = sum(info.bytes for info in tensors.values())
        output.parent.mkdir(parents=True, exist_ok=True)
        with working_folder(args.output) as working:
            free = shutil.disk_usage(working).free
            if size + SPACE_MARGIN > free:
                raise OSError(f"too little space: the weights take {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")
            write(args, weights, config, tensors, working)
            working.rename(output)
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        print(f"error: --output {args.output} was not written: {error}", file=sys.stderr)
        return RUN_ERROR
    seconds = time.monotonic() - started
    print(f"wrote {args.output}: {config.name}, {len(tensors)} tensors, {size / 1e9:.2f} GB in {seconds:.1f} s")
    return 0


def check_free(output: Path) -> None:
    if output.exists():
        raise PretrainedError(f"--output {output} exists; a name that is free works")


@contextlib.contextmanager
def working_folder(output: Path) -> Iterator[Path]:
    """An empty folder beside `output` for this process alone. Raises PretrainedError when another one is writing `output`."""
    name = output.resolve()
    working, lock = name.with_name(name.name + INCOMPLETE), name.with_name(name.name + LOCK)
    try:
        held = lock_file(lock)
    except Locked as other:
        raise PretrainedError(
            f"--output {output} is being written by {other}; another name works. If that conversion is no more, on a host that is "
            f"gone: rm {lock}"
        ) from None
    try:
        check_free(output)  # again: another conversion may have ended since
        if working.exists():  # of a conversion that was killed
            shutil.rmtree(working)
        working.mkdir()
        yield working
    finally:
        shutil.rmtree(working, ignore_errors=True)
        lock.unlink(missing_ok=True)
        if held is not None:
            held.close()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--from", dest="source", choices=("hf", "meta", "megacp"), required=True, help="format of --input")
    add("--to", dest="target", choices=("hf", "megacp"), required=True, help="format of --output")
    add("--input", type=Path, required=True, metavar="DIR", help="folder to read; never changed")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="of the weights written; keep: each as it is")
    add("--max-shard-size", type=size_in_bytes, default="5GB", metavar="SIZE", help="largest safetensors file; MB, GB, MiB, GiB")
    add("--iteration", type=int, metavar="N", help="checkpoint to read, with --from megacp (default: the newest)")
    add("--hf-files", type=Path, metavar="DIR",
        help="where config.json, tokenizer and generation config come from (default: the input's own)")  # fmt: skip
    add("--extend-context", type=COUNT, metavar="TOKENS",
        help="context of the model written, with --rotary-base or --rope-scaling-type, whose original context is the model's own; "
             "yarn's factor follows from it")  # fmt: skip
    add_rope_flags(parser)
    return parser


def size_in_bytes(text: str) -> int:
    """
    >>> size_in_bytes("5GB"), size_in_bytes("512 MiB")
    (5000000000, 536870912)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; 5GB or 512MiB is")
    return size


def open_weights(args: argparse.Namespace) -> Weights:
    if args.iteration is not None and args.source != "megacp":
        raise ArgumentError(f"--iteration {args.iteration} means nothing with --from {args.source}; --from megacp has iterations")
    if args.source == "hf":
        return HuggingFaceWeights(args.input)
    if args.source == "megacp":
        return SavedWeights(args.input, args.iteration)
    weights = MetaWeights(args.input)
    for line in weights.assumptions:
        print(f"note: {line}")
    return weights


def extended(config: ModelConfig, args: argparse.Namespace) -> ModelConfig:
    """`config` with the context and rotary positions of --extend-context. Raises ArgumentError."""
    tokens, scaling = args.extend_context, config.rope_scaling
    rope_flags = [name for name in vars(args) if name.startswith(("rope_", "rotary_")) and getattr(args, name) is not None]
    if tokens is None:
        if rope_flags:
            flag = "--" + rope_flags[0].replace("_", "-")
            raise ArgumentError(f"{flag} changes the context of the model; --extend-context 1048576 says for how many tokens")
        return config
    if not rope_flags:
        raise ArgumentError(f"--extend-context {tokens} needs --rotary-base BASE or --rope-scaling-type yarn")
    if tokens < config.max_position_embeddings:
        raise ArgumentError(
            f"--extend-context {tokens} is less than the {config.max_position_embeddings} tokens of the model; "
            f"{2 * config.max_position_embeddings} works"
        )
    # YaRN stretches the context before any other scaling: of Llama 3.1 the 8,192 tokens, not the 131,072.
    original = args.rope_original_max_position_embeddings or (
        scaling.original_max_position_embeddings if scaling else config.max_position_embeddings
    )
    flags = dict(vars(args), seq_length=tokens)
    if args.rope_scaling_type == "yarn":
        factor = args.rope_scaling_factor or max(1.0, tokens / original)
        flags |= dict(rope_original_max_position_embeddings=original, rope_scaling_factor=factor)
    if args.rope_scaling_type == "llama3":  # its factor is no ratio of contexts: Llama 3.1 goes from 8,192 to 131,072 with 8
        if args.rope_scaling_factor is None:
            raise ArgumentError(
                f"--rope-scaling-type llama3 needs --rope-scaling-factor: {tokens} tokens over the original {original}; "
                f"--rope-scaling-factor {max(1, math.ceil(tokens / original))} works"
            )
        flags |= dict(rope_original_max_position_embeddings=original)
    flags = argparse.Namespace(**flags)
    check_rope_scaling(flags, config)
    base = args.rotary_base or config.rotary_base
    changed = dataclasses.replace(
        config, max_position_embeddings=tokens, rotary_base=base, rope_scaling=rope_scaling_from_args(flags, config)
    )
    print(f"context {config.max_position_embeddings:,} -> {tokens:,} tokens: rotary base {base:g}, scaling {changed.rope_scaling}")
    return changed


def write(args: argparse.Namespace, weights: Weights, config: ModelConfig, tensors: dict[str, TensorInfo], working: Path) -> None:
    """Fills the folder `working`."""
    files = args.hf_files or (args.input / HF_FILES if args.source == "megacp" else args.input)
    base = read_config(files) if args.hf_files or (files / CONFIG).is_file() else None
    dtypes = {info.dtype for info in tensors.values()}
    described = max(dtypes, key=lambda dtype: dtype.itemsize)
    try:
        values = config_to_hugging_face(config, described, base)
    except PretrainedError as error:
        raise PretrainedError(f"--hf-files {files}: {error}") from None

    def read(name: str) -> Tensor:
        return weights.read(name).to(tensors[name].dtype)

    if args.target == "megacp":
        save_weights(working, config, tensors, read, source=f"{args.source} {args.input}")
        hf_folder = working / HF_FILES
        hf_folder.mkdir()
    else:
        hf_folder = working
        theirs = {hugging_face_name(name): name for name in tensors}
        infos = {name: tensors[ours] for name, ours in theirs.items()}
        write_sharded(working, infos, lambda name: read(theirs[name]), args.max_shard_size, report=print)
    (hf_folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    companions = sorted({path for pattern in COMPANIONS for path in files.glob(pattern) if path.is_file()})
    for path in companions:
        shutil.copyfile(path, hf_folder / path.name)
    if not any(path.name.startswith("tokenizer") for path in companions):
        print(f"note: no tokenizer files in {files}; --hf-files DIR names a folder that has them")


if __name__ == "__main__":
    sys.exit(main())
