"""Turn text into tokens on disk: Megatron's PREFIX.bin and PREFIX.idx, which --data-path PREFIX reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --tokenizer-model data/tokenizer.model --append-eod

    python tools/preprocess_data.py --input src/ notes.txt table.parquet --extensions .py .md --output-prefix data/mine \\
        --tokenizer-model Llama-3.1-8B/ --append-eod --dedup --min-tokens 32

    zstdcat pages/*.zst | python tools/preprocess_data.py --input - --output-prefix data/pages --tokenizer-type Byte --append-eod

A file is a document, in .jsonl a line, in .parquet a row; .gz and .zst are read as they are. One process reads and writes, --workers
processes tokenize, in the order of the input: the output is the same for any number of them, and they share even one huge document.
A few tasks a worker are in memory at a time, whatever the size of the documents.

Every few seconds what is done is made safe in PREFIX.partial. After a kill the same command goes on from there, and the result is
the same to the byte. At the end PREFIX.bin, PREFIX.idx and PREFIX.manifest.json (inputs, hashes, tokenizer, options, counts) appear.
"""

import argparse
import functools
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from megacp.data.document_tasks import Encoder, Position, TaskReader, encode, load_tokenizer
from megacp.data.document_writer import REASONS, DocumentWriter, Limits
from megacp.data.indexed_dataset import DatasetError, best_dtype
from megacp.data.manifest import MANIFEST, Manifest, describe_tokenizer, read_manifest
from megacp.data.packing_plan import check_output_prefix
from megacp.data.partial_dataset import PartialDataset
from megacp.data.raw_documents import ERRORS, STDIN, Source, find_sources
from megacp.data.safe_cuts import STRETCH_CHARS
from megacp.data.tokenizer import TOKENIZER_TYPES, Tokenizer
from megacp.data.workers import map_in_order

CHECKPOINT_SECONDS = 5.0  # the most work that a kill costs
OUTPUT_NAMES = (".bin", ".idx", ".groups", MANIFEST, "journal.jsonl")  # endings of what is written; the last is in PREFIX.partial
PROGRESS_SECONDS = 5.0  # between lines where there is no terminal to draw a bar on


class Progress:
    """A bar on a terminal, else a line every PROGRESS_SECONDS, on stderr."""

    def __init__(self, sources: list[Source], start: int, writer: DocumentWriter):
        files = [source.path for source in sources if os.path.isfile(source.path)]
        sizes = [os.path.getsize(path) for path in files]
        self._total = sum(sizes) if len(files) == len(sources) else None  # bytes as stored; a pipe has none
        self._before = sum(sizes[:start])  # what earlier runs have read to the end
        self._writer, self._begun = writer, Counter(writer.counts)
        self._started = self._shown = time.monotonic()
        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}B [{elapsed}<{remaining}{postfix}]"
        if self._total is None:
            form = "{n_fmt}B [{elapsed}{postfix}]"
        self._bar = tqdm(total=self._total, initial=self._before, unit_scale=True, bar_format=form, disable=not sys.stderr.isatty())

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def show(self, stored_bytes: int) -> None:
        """`stored_bytes` of the input files are done since the start of this run."""
        self._bar.set_postfix_str(self.rates(), refresh=False)
        self._bar.update(self._before + stored_bytes - self._bar.n)
        if self._bar.disable and time.monotonic() - self._shown >= PROGRESS_SECONDS:
            self._shown = time.monotonic()
            done = self._before + stored_bytes
            line = f"{done / 1e6:,.1f} MB   {self.rates()}"
            if self._total:
                left = self.seconds * (self._total - done) / max(stored_bytes, 1)
                line = f"{done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB ({done / self._total:.0%})   {self.rates()}   {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def rates(self) -> str:
        """Since the start of this run, of the text as UTF-8."""
        counts = self._writer.counts
        text = (self._writer.read_bytes - self._begun["read_bytes"]) / self.seconds
        tokens = (counts["tokens"] - self._begun["tokens"]) / self.seconds
        return f"{text / 1e6:.1f} MB/s, {tokens / 1e6:.2f} M tokens/s, {counts['documents']:,} documents"

    def close(self) -> None:
        self._bar.close()


def options_of(args: argparse.Namespace, tokenizer: Tokenizer) -> dict:
    """What decides the output beside the input. (--errors may change between runs: what is done was done without, or as asked.)"""
    names = ("append_eod", "prepend_bos", "min_tokens", "max_tokens", "dedup", "write_groups", "check_round_trip", "json_keys")
    return {"tokenizer_sha256": tokenizer.fingerprint, **{name: getattr(args, name) for name in names}}


def preprocess(args: argparse.Namespace, tokenizer: Tokenizer) -> Manifest:
    """Write the dataset. Raises DatasetError or OSError; then what is done stays in PREFIX.partial."""
    check_output_prefix(args.output_prefix)
    check_apart(args)
    sources = find_sources(args.input, args.extensions, args.stdin_format)
    options = options_of(args, tokenizer)
    with PartialDataset(args.output_prefix, best_dtype(tokenizer.vocab_size), options, args.restart) as partial:
        if not partial.may_replace:
            check_same_dataset(args.output_prefix, options, sources)
        check_finished(finished_inputs(partial), sources, partial.is_complete)
        if partial.is_complete:
            return partial.publish()
        start = Position(**partial.last["position"]) if partial.last else Position()
        limits = Limits(args.min_tokens, args.max_tokens)
        bos, eod = tokenizer.bos if args.prepend_bos else None, tokenizer.eod if args.append_eod else None
        writer = DocumentWriter(partial, bos, eod, limits, args.write_groups)
        if partial.last:
            writer.counts.update(partial.last["counts"])
            writer.skipped_names = partial.last["skipped_names"]
            print(f"going on after {writer.counts['documents']:,} documents in {partial.folder}", file=sys.stderr)
        encoder = Encoder(
            args.tokenizer_type, args.tokenizer_model, args.errors, tuple(args.json_keys), args.max_stretch_chars,
            args.dedup, args.write_groups, args.check_round_trip,
        )  # fmt: skip
        reader = TaskReader(sources, tokenizer, encoder, start)
        run(reader, functools.partial(encode, encoder), writer, partial, args.workers)
        counts = dict(writer.counts)
        if not counts["documents"]:
            partial.discard()
            left_out = ", ".join(f"{counts[reason]} {reason.replace('_', ' ')}" for reason in REASONS)
            raise DatasetError(f"--input {' '.join(args.input)}: no document is left ({left_out})")
        described, inputs = describe_tokenizer(tokenizer, args.tokenizer_model), finished_inputs(partial)
        return partial.publish(
            Manifest(described, {**options, "errors": args.errors}, inputs, counts, writer.skipped_names), args.write_groups
        )


def check_apart(args: argparse.Namespace) -> None:
    """Raises DatasetError when a folder of --input would be read together with what is written into it."""
    output = Path(args.output_prefix).resolve()
    for name in args.input:
        inside = name != STDIN and Path(name).is_dir() and Path(name).resolve() in output.parents
        if inside and (args.extensions is None or any(own.endswith(tuple(args.extensions)) for own in OUTPUT_NAMES)):
            beside = Path(name).resolve().parent / f"{Path(name).resolve().name}-tokens" / output.name
            raise DatasetError(
                f"--output-prefix {args.output_prefix} is inside --input {name}, where a second run would read it as text; "
                f"{beside} works"
            )


def check_same_dataset(prefix: str, options: dict, sources: list[Source]) -> None:
    """Raises DatasetError where the name is that of a finished dataset of other inputs or options, or of unknown ones."""
    if not Path(f"{prefix}.idx").exists():
        return
    try:
        made = read_manifest(prefix)
    except DatasetError:  # a damaged one tells as little as none
        made = None
    wanted = json.loads(json.dumps(options))
    if made is None:
        other = ["no manifest tells what it is made of"]
    else:
        other = [f"{name} was {made.options.get(name)}" for name, value in wanted.items() if made.options.get(name) != value]
        if [record["path"] for record in made.inputs] != [source.path for source in sources]:
            other.append("it was made of other inputs")
        changed = (record["path"] for record in made.inputs if is_changed(record))
        other += [f"{path} has another size now" for path in changed]
    if other:
        raise DatasetError(
            f"--output-prefix {prefix}: {prefix}.bin and .idx are another dataset ({other[0]}); name another prefix, or "
            "--restart to replace it"
        )


def is_changed(record: dict) -> bool:
    """Whether a file that was read has another size now."""
    return os.path.isfile(record["path"]) and os.path.getsize(record["path"]) != record["bytes"]


def finished_inputs(partial: PartialDataset) -> list[dict]:
    """Records of the inputs that are read to the end, in order."""
    return [record for line in partial.records for record in line.get("finished", ())]  # the line of a complete dataset has none


def check_finished(finished: list[dict], sources: list[Source], is_all: bool) -> None:
    """Raises DatasetError when the inputs an earlier run has read to the end are not the first of these, or with `is_all` these."""
    way_out = "put the input back as it was, or begin anew with --restart"
    for record, source in zip(finished, [*sources, *[None] * len(finished)]):
        same = source is not None and record["path"] == source.path
        if not same or is_changed(record):
            found = "it has another size now" if same else f"now {source.path if source else 'nothing'} comes there"
            raise DatasetError(f"--input: an earlier run has read {record['path']}, {found}; {way_out}")
    if is_all and len(finished) < len(sources):
        last, more = finished[-1]["path"], sources[len(finished)].path
        raise DatasetError(f"--input: an earlier run has read all, {last} last, now {more} comes after it; {way_out}")


def run(reader: TaskReader, encode_task, writer: DocumentWriter, partial: PartialDataset, workers: int) -> None:
    """All tasks, with checkpoints; a last one also when reading or encoding fails."""
    progress = Progress(reader.sources, reader.start.source, writer)
    position = saved = reader.start
    checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
    results = map_in_order(encode_task, reader, workers)

    def checkpoint() -> None:
        nonlocal saved, checkpoint_at
        finished = reader.finished[saved.source - reader.start.source : position.source - reader.start.source]
        partial.checkpoint(
            {"position": asdict(position), "finished": finished, "counts": writer.counts, "skipped_names": writer.skipped_names}
        )
        saved, checkpoint_at = position, time.monotonic() + CHECKPOINT_SECONDS

    try:
        while True:
            try:
                result = next(results, None)
            except (DatasetError, KeyboardInterrupt):
                partial.drop_document()
                if position != saved:
                    checkpoint()
                raise
            if result is None:
                break
            writer.add(result)
            position = result.position or position
            if result.position and time.monotonic() >= checkpoint_at:
                checkpoint()
            progress.show(result.stored_bytes)
        if position != saved:
            checkpoint()
    finally:
        results.close()
        progress.close()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, metavar="PATH",
        help="text (a document each), .jsonl, .parquet, the first two also as .gz and .zst, folders of them, - for standard input")  # fmt: skip
    add("--extensions", nargs="+", metavar="EXT", help="of a folder, only files that end so, such as .py .md")
    add(
        "--stdin-format",
        choices=("jsonl", "text"),
        default="jsonl",
        help="standard input: a document a line of JSON, or one document",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="the text of a JSON line or a row; several are joined")
    add("--errors", choices=ERRORS, default="strict", help="a document that cannot be used: stop, mend or leave out")

    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer-model",
        metavar="FILE",
        help="a SentencePiece .model, tokenizer.json, Llama 3's tokenizer.model, or a folder with one",
    )
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="needed for Byte, which has no model (default: told by the file)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--prepend-bos", action="store_true", help="begin each document with the begin-of-text token")
    add("--max-stretch-chars", type=int, default=STRETCH_CHARS, metavar="N",
        help="characters of a document that may go by without a place to cut it; takes about 200 bytes each (default: %(default)s)")  # fmt: skip
    add("--check-round-trip", action="store_true", help="decode every document again and compare")

    add = parser.add_argument_group("documents to keep").add_argument
    add("--min-tokens", type=int, default=0, metavar="N", help="leave out documents with fewer tokens (bos and eod not counted)")
    add("--max-tokens", type=int, metavar="N", help="leave out documents with more tokens")
    add("--dedup", action="store_true", help="of documents with the same text keep the first")

    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.manifest.json")
    add(
        "--write-groups",
        action="store_true",
        help="also PREFIX.groups, a line a document: its path, or the fields of its JSON line",
    )
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that tokenize (default: the CPUs)")
    add("--restart", action="store_true",
        help="throw away what an interrupted run left in PREFIX.partial, and replace another dataset of this name")
    args = parser.parse_args(argv)
    for flag, least in (("workers", 1), ("max_stretch_chars", 1), ("min_tokens", 0), ("max_tokens", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            parser.error(f"--{flag.replace('_', '-')} {value} must be at least {least}")
    if args.max_tokens is not None and args.max_tokens < args.min_tokens:
        parser.error(f"--max-tokens {args.max_tokens} is less than --min-tokens {args.min_tokens}; nothing would be left")
    return args


def report(prefix: str, manifest: Manifest, seconds: float) -> None:
    counts, output, tokenizer = manifest.counts, manifest.output, manifest.tokenizer
    print(
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens ({output['dtype']}), "
        f"{counts['text_bytes'] / counts['tokens']:.2f} bytes per token, {seconds:.1f} s"
    )
    for reason in REASONS:
        if counts[reason]:
            names = f": {', '.join(manifest.skipped_names)}" if reason == "skipped" else ""
            left_out = f"{counts[reason]:,} {reason.replace('_', ' ')} documents left out"
            print(f"{left_out} ({counts[f'{reason}_tokens']:,} tokens){names}")
    if counts["altered"]:
        print(f"{counts['altered']:,} documents kept that the tokenizer does not give back as they were (--check-round-trip)")
    special = ", ".join(f"{name} {tokenizer[name]}" for name in ("bos", "eod", "pad") if tokenizer[name] is not None)
    print(f"{tokenizer['type']} tokenizer: {tokenizer['vocab_size']:,} ids, {special}")
    print(f"wrote {prefix}.bin, .idx and .manifest.json; train with --data-path {prefix} --vocab-size {tokenizer['vocab_size']}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    started = time.monotonic()
    try:
        tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model)
        if args.prepend_bos and tokenizer.bos is None:
            raise DatasetError(f"--prepend-bos: {tokenizer} has no begin-of-text token")
        manifest = preprocess(args, tokenizer)
    except (DatasetError, OSError, KeyboardInterrupt) as error:
        partial = Path(f"{args.output_prefix}.partial")
        kept = f"What is done is in {partial}; the same command goes on from there." if partial.exists() else "Nothing was written."
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        print(f"preprocess_data: {reason}\n{kept}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    report(args.output_prefix, manifest, time.monotonic() - started)


if __name__ == "__main__":
    main()
