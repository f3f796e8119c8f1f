"""Turn text into tokens on disk: Megatron's PREFIX.bin and PREFIX.idx, which --data-path PREFIX reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePiece --tokenizer-model data/tokenizer.model --append-eod

    python tools/preprocess_data.py --input src/ notes.txt --extensions .py .md --output-prefix data/mine \\
        --tokenizer-type Byte --append-eod

Prints a line every few seconds:      120.4 of 981.3 MB (12%)   6.2 MB/s   1.9 M tokens/s   10,412 documents

One process reads and writes, --workers processes tokenize, in the order of the input: the output is the same for any number of
workers. A few tasks a worker are in memory at a time. The files get their names when they are complete; an interrupted run
leaves none.
"""

import argparse
import functools
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megacp.data.indexed_dataset import DatasetError, IndexedDatasetBuilder, best_dtype
from megacp.data.raw_documents import ERRORS, RawDocument, decode, find_sources, read_documents
from megacp.data.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

TASK_BYTES = 1 << 20  # documents of together about 1 MiB go to a worker at a time: enough to hide the cost of sending them
TASKS_PER_WORKER = 4  # waiting or done and not yet written
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to turn raw documents into ids; small, so that it travels with each task."""

    tokenizer_type: str
    tokenizer_model: str | None
    append_eod: bool
    errors: str
    json_keys: tuple[str, ...]


@dataclass
class Encoded:
    """The documents of one task, and what became of the others."""

    raw_bytes: int = 0
    documents: list[np.ndarray] = field(default_factory=list)  # ids of each
    empty: int = 0
    skipped: list[str] = field(default_factory=list)  # names


_tokenizer = functools.cache(build_tokenizer)  # one per process


def encode(encoder: Encoder, task: list[RawDocument]) -> Encoded:
    """Tokenize the documents of a task, in order. Raises DatasetError naming the document."""
    tokenizer = _tokenizer(encoder.tokenizer_type, encoder.tokenizer_model)
    dtype = best_dtype(tokenizer.vocab_size)
    result = Encoded(raw_bytes=sum(len(raw.data) for raw in task))
    for raw in task:
        text = decode(raw, encoder.errors, encoder.json_keys)
        if text is None:
            result.skipped.append(raw.name)
        elif not text:
            result.empty += 1
        else:
            ids = tokenizer.encode(text)
            result.documents.append(np.array([*ids, tokenizer.eod] if encoder.append_eod else ids, dtype=dtype))
    return result


def tasks_of(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """Runs of documents of about TASK_BYTES; a longer document is a task of its own."""
    task, size = [], 0
    for raw in documents:
        task.append(raw)
        size += len(raw.data)
        if size >= TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task


def map_in_order(function: Callable, items: Iterable, workers: int) -> Iterator:
    """function(item) of each item, in order, over `workers` processes (1: this process), few items ahead."""
    if workers == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        pending = deque()
        for item in items:
            if len(pending) == workers * TASKS_PER_WORKER:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DatasetError(f"a worker process died (out of memory?); fewer than --workers {workers} need less") from error
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """Counts, and a line on stderr every PROGRESS_SECONDS."""

    def __init__(self, total_bytes: int | None):
        self.total_bytes = total_bytes  # None when compressed
        self.started = self._shown = time.monotonic()
        self.raw_bytes = self.tokens = self.documents = self.empty = 0
        self.skipped: list[str] = []

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def add(self, result: Encoded) -> None:
        self.raw_bytes += result.raw_bytes
        self.tokens += sum(len(ids) for ids in result.documents)
        self.documents += len(result.documents)
        self.empty += result.empty
        self.skipped += result.skipped
        if time.monotonic() - self._shown >= PROGRESS_SECONDS:
            self._shown = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        done = f"{self.raw_bytes / 1e6:,.1f}"
        if self.total_bytes:
            done += f" of {self.total_bytes / 1e6:,.1f} MB ({self.raw_bytes / self.total_bytes:.0%})"
        else:
            done += " MB"
        mb_per_s, tokens_per_s = self.raw_bytes / self.seconds / 1e6, self.tokens / self.seconds / 1e6
        return f"{done}   {mb_per_s:.1f} MB/s   {tokens_per_s:.2f} M tokens/s   {self.documents:,} documents"


def preprocess(args: argparse.Namespace, tokenizer: Tokenizer) -> Progress:
    """Write the dataset; returns what was counted. Raises DatasetError, and then leaves nothing."""
    sources = find_sources(args.input, args.extensions)
    compressed = any(path.name.endswith(".gz") for path in sources)
    progress = Progress(None if compressed else sum(path.stat().st_size for path in sources))
    encoder = Encoder(args.tokenizer_type, args.tokenizer_model, args.append_eod, args.errors, tuple(args.json_keys))
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(args.output_prefix, best_dtype(tokenizer.vocab_size)) as builder:
        tasks = tasks_of(read_documents(sources))
        for result in map_in_order(functools.partial(encode, encoder), tasks, args.workers):
            for ids in result.documents:
                builder.add_document(ids)
            progress.add(result)
        if not progress.documents:
            raise DatasetError(
                f"--input {' '.join(args.input)}: no document with text ({progress.empty} empty, {len(progress.skipped)} skipped)"
            )
        builder.finalize()
    return progress


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="text files (a document each), .jsonl, .jsonl.gz, folders of them"
    )
    parser.add_argument("--extensions", nargs="+", metavar="EXT", help="of a folder, only files that end so, such as .py .md")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="the text of a JSON line; several are joined"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    parser.add_argument("--tokenizer-model", metavar="FILE", help="the .model or tokenizer.json; not for Byte")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that tokenize (default: the CPUs)"
    )
    parser.add_argument(
        "--errors", choices=ERRORS, default="strict", help="a document that is not UTF-8 or JSON: stop, mend or leave out"
    )
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
        counted = preprocess(args, tokenizer)
    except (DatasetError, OSError) as error:
        sys.exit(f"preprocess_data: {error}\nNothing was written under {args.output_prefix}.")
    print(counted.line())
    print(
        f"{counted.documents:,} documents, {counted.tokens:,} tokens ({best_dtype(tokenizer.vocab_size).name}), "
        f"{counted.raw_bytes / counted.tokens:.2f} bytes per token, {counted.seconds:.1f} s"
    )
    if counted.empty:
        print(f"{counted.empty:,} empty documents left out")
    if counted.skipped:
        shown = ", ".join(counted.skipped[:5]) + (", ..." if len(counted.skipped) > 5 else "")
        print(f"{len(counted.skipped):,} documents skipped (--errors skip): {shown}")
    print(
        f"wrote {args.output_prefix}.bin and .idx; train with --data-path {args.output_prefix} --vocab-size {tokenizer.vocab_size}"
    )


if __name__ == "__main__":
    main()
