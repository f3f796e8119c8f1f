"""Look into datasets (PREFIX of .bin/.idx) and packing plans (folders), check them, put them together.

    python tools/inspect_data.py stats data/books data/plan-5m --histogram lengths.png
    python tools/inspect_data.py show data/books --document 12 --tokenizer-type Byte
    python tools/inspect_data.py show data/plan-5m --sequence 0 --tokenizer-model tokenizer.json
    python tools/inspect_data.py verify data/books data/plan-5m --vocab-size 128256
    python tools/inspect_data.py merge --input data/books data/code --output-prefix data/all
    python tools/inspect_data.py blend --data-path 0.3 data/books 0.7 data/plan-5m --seq-length 5242880 --samples 1000

`verify` reads every byte and exits with 1 when something is wrong. `merge` writes what Megatron's merge writes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacp.data.dataset import BlendedDataset, PlanDataset, SequenceDataset, build_dataset, build_datasets, parse_data_path
from megacp.data.histogram import check_picture, draw, fill_histogram, length_histogram, text_table
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.merge import merge_datasets
from megacp.data.packing_plan import PackingPlan, is_plan
from megacp.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megacp.data.verification import verify_dataset, verify_plan

SHOWN_PIECES = 20  # of a sequence
PIECE_TOKENS = 24  # shown of each


def stats(args: argparse.Namespace) -> None:
    """Documents, tokens and their lengths; of a plan also how full its sequences are."""
    if args.histogram:
        check_picture(args.histogram)
    panels = []
    for path in args.paths:
        if is_plan(path):
            plan = PackingPlan(path)
            share = plan.filled.sum() / (len(plan) * plan.seq_length)
            size = f"{len(plan):,} sequences of {plan.seq_length:,} tokens, {share:.3%} filled, {len(plan.documents):,} pieces"
            print(f"{path}: plan of {size}")
            panels.append((f"{path}: filled", "sequences", fill_histogram(plan.filled, plan.seq_length)))
            lengths, noun = plan.piece_lengths(), "pieces"
        else:
            indexed = IndexedDataset(path)
            lengths, noun = indexed.document_lengths, "documents"
            print(f"{path}: {len(lengths):,} documents, {indexed.num_tokens:,} tokens of {indexed.dtype.name}")
        if len(lengths):
            least, middle, most = np.percentile(lengths, [0, 50, 100])
            print(f"tokens of {noun}: {least:,.0f} least, {middle:,.0f} median, {lengths.mean():,.1f} mean, {most:,.0f} most")
        panels.append((f"{path}: tokens", noun, length_histogram(lengths)))
        for heading, noun, bins in panels[-2:] if is_plan(path) else panels[-1:]:
            print("\n".join(["", *text_table(bins, heading.removeprefix(f"{path}: "), noun)]))
        print()
    if args.histogram:
        draw(args.histogram, "documents and tokens by length", panels)
        print(f"wrote {args.histogram}")


def show(args: argparse.Namespace) -> None:
    """A document, or what training reads as a sample."""
    decode = decoder(args)
    if args.document is not None:
        if is_plan(args.path):
            raise DatasetError(f"{args.path} is a plan; --document takes one of its datasets, --sequence a sequence of the plan")
        indexed = IndexedDataset(args.path)
        if not 0 <= args.document < indexed.num_documents:
            raise DatasetError(f"--document {args.document}: {args.path} has documents 0 to {indexed.num_documents - 1}")
        length = int(indexed.document_lengths[args.document])
        start, stop = min(args.start, length), min(args.start + args.tokens, length)
        print(f"{args.path}: document {args.document}, {length:,} tokens; tokens {start:,} to {stop:,}:")
        print(decode(indexed.read_document(args.document, start, stop)))
        return
    seq_length = args.seq_length or (PackingPlan(args.path).seq_length if is_plan(args.path) else None)
    if seq_length is None:
        raise DatasetError(f"--sequence {args.sequence} of {args.path} needs --seq-length, that of training")
    dataset = build_dataset([args.path], seq_length, args.seed)
    show_sequence(dataset, args.sequence, args.start, args.tokens, decode)


def show_sequence(dataset: SequenceDataset, i: int, start: int, count: int, decode: Callable[[np.ndarray], str]) -> None:
    borders, labels, length = dataset.document_borders(i), dataset.label_count(i), dataset.seq_length
    print(f"{dataset.source(i)}: sample {i}; an epoch has {len(dataset):,}")
    print(f"{length:,} tokens, {labels:,} labels, {len(borders) - 1:,} documents")
    pieces = dataset.plan.pieces(dataset.sequence(i)) if isinstance(dataset, PlanDataset) else None
    for number, (first, stop) in enumerate(zip(borders.tolist(), borders[1:].tolist())):
        if number == SHOWN_PIECES:
            print(f"  ... {len(borders) - 1 - number:,} more")
            break
        where = ""
        if pieces is not None:
            piece = pieces[number] if number < len(pieces) else None
            end = f" from its token {piece.start:,}" if piece and piece.start else ""
            where = f"  {Path(piece.dataset.prefix).name} document {piece.document}{end}" if piece else "  padding"
        head = decode(dataset.tokens(i, first, min(stop, first + PIECE_TOKENS)))
        print(f"  {first:>10,} {stop - first:>10,} tokens{where}  {head!r}")
    start, stop = min(start, length), min(start + count, length)
    print(f"tokens {start:,} to {stop:,}:\n{decode(dataset.tokens(i, start, stop))}")


def decoder(args: argparse.Namespace) -> Callable[[np.ndarray], str]:
    """Ids to text; without a tokenizer the ids themselves."""
    if not (args.tokenizer_type or args.tokenizer_model):
        return lambda ids: " ".join(map(str, ids.tolist()))
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
    return lambda ids: tokenizer.decode(ids.tolist())


def verify(args: argparse.Namespace) -> int:
    """1 when one of the paths is not what it says; all are looked at."""
    failed = 0
    for path in args.paths:
        try:
            lines = verify_plan(path, args.vocab_size) if Path(path).is_dir() else verify_dataset(path, args.vocab_size)
            print("\n  ".join(lines), "\n  good", flush=True)
        except (DatasetError, OSError) as error:
            failed = 1
            print(f"{path}: BAD\n  {error}", flush=True)
    return failed


def merge(args: argparse.Namespace) -> None:
    merged = merge_datasets(args.input, args.output_prefix, progress=lambda line: print(line, flush=True))
    print(f"wrote {args.output_prefix}.bin and .idx: {merged.num_documents:,} documents, {merged.num_tokens:,} tokens")


def blend(args: argparse.Namespace) -> None:
    """What each dataset of --data-path gives, and how often it comes round."""
    train, _, _ = build_datasets(args.data_path, args.split, args.seq_length, args.seed, parts=("train",))
    weighted = parse_data_path(args.data_path)
    datasets = train.datasets if isinstance(train, BlendedDataset) else [train]
    located = [train.locate(i)[0] if isinstance(train, BlendedDataset) else 0 for i in range(args.samples)]
    given, total = np.bincount(located, minlength=len(datasets)), sum(weight for weight, _ in weighted)
    print(f"{args.samples:,} samples of {args.seq_length:,} tokens: {args.samples * args.seq_length:,} tokens of training")
    print(f"{'weight':>8}  {'samples':>12}  {'share':>7}  {'an epoch':>12}  {'epochs':>8}  path")
    for (weight, path), dataset, count in zip(weighted, datasets, given.tolist()):
        share, epochs = count / max(1, args.samples), count / len(dataset)
        print(f"{weight / total:>8.4f}  {count:>12,}  {share:>7.2%}  {len(dataset):>12,}  {epochs:>8.2f}  {path}")
    first = " ".join(map(str, located[:40]))
    print(f"first samples come from path {first}{' ...' if args.samples > 40 else ''} (counted from 0)")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Callable, text: str) -> Callable:
        sub = commands.add_parser(function.__name__, help=text, description=text)
        sub.set_defaults(function=function)
        return sub.add_argument

    add = command(stats, "documents, tokens, histogram of lengths, fill of plans")
    add("paths", nargs="+", metavar="PATH", help="prefixes of .bin/.idx, or folders of plans")
    add("--histogram", metavar="FILE.png", help="also draw the histograms")

    add = command(show, "decode a document, or a sequence as training reads it")
    add("path", metavar="PATH", help="prefix of .bin/.idx, or folder of a plan")
    add("--document", type=int, metavar="D", help="this document of the dataset")
    add("--sequence", type=int, metavar="I", help="sample I of training on all of PATH, shuffled by --seed")
    add("--seq-length", type=int, metavar="TOKENS", help="of training (default: the plan's)")
    add("--seed", type=int, default=1234, metavar="N", help="of training (default: %(default)s)")
    add("--start", type=int, default=0, metavar="TOKEN", help="first token shown (default: %(default)s)")
    add("--tokens", type=int, default=256, metavar="N", help="tokens shown (default: %(default)s)")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="needed for Byte, else told by the file")
    add("--tokenizer-model", metavar="FILE", help="without a tokenizer, ids are shown")

    add = command(verify, "read every byte: index, ids, hashes; of plans: every token once")
    add("paths", nargs="+", metavar="PATH", help="prefixes of .bin/.idx, or folders of plans")
    add("--vocab-size", type=int, metavar="N", help="ids must be below it")

    add = command(merge, "several .bin/.idx as one")
    add("--input", nargs="+", required=True, metavar="PREFIX")
    add("--output-prefix", required=True, metavar="PREFIX")

    add = command(blend, "preview of a weighted --data-path")
    add("--data-path", nargs="+", required=True, metavar="W P", help="as for training: weight path weight path ...")
    add("--seq-length", type=int, required=True, metavar="TOKENS")
    add("--samples", type=int, default=1000, metavar="N", help="--train-iters x --global-batch-size (default: %(default)s)")
    add("--split", default="1,0,0", metavar="A,B,C", help="as for training; the first part is shown (default: %(default)s)")
    add("--seed", type=int, default=1234, metavar="N", help="of training (default: %(default)s)")

    args = parser.parse_args(argv)
    if args.command == "show" and (args.document is None) == (args.sequence is None):
        parser.error("show takes one of --document D and --sequence I")
    for name in ("sequence", "start", "tokens", "samples", "seed"):
        if getattr(args, name, None) is not None and getattr(args, name) < 0:
            parser.error(f"--{name} {getattr(args, name)} must be 0 or more")
    if getattr(args, "seq_length", None) is not None and args.seq_length < 1:
        parser.error(f"--seq-length {args.seq_length} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return args.function(args) or 0
    except (DatasetError, OSError) as error:
        print(f"inspect_data {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
