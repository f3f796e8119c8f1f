"""Plan how documents share sequences of --seq-length tokens; train with --data-path PLAN.

    python tools/pack_documents.py --input data/books data/code --seq-length 5242880 --output data/plan-5m

    python tools/pack_documents.py --input data/code --seq-length 1048576 --output data/plan-1m --group-by path:2 \\
        --separator bos --histogram plan.png

Documents that fit a sequence are never cut: best-fit-decreasing puts each where it leaves the least room. Longer ones give whole
sequences and a rest, which is packed like a document. Every token is in the plan once, unless --drop-shorter-than or --min-fill
leave some out; the report adds up where all went. What stays empty at the end of a sequence is padding, without labels.

Where documents are few and near the length of a sequence, much stays empty (the report says how much); training on the datasets
without a plan (--data-path PREFIX) fills every sequence, and cuts documents wherever one is full.

--group-by keeps related documents together, by a file with one line a document: PREFIX.groups (preprocess_data.py --write-groups), or
--groups FILE.
    key           documents with the same line
    path:N        lines that are paths: documents in the same N topmost folders
    field:NAME    lines of JSON: documents with the same value of that field

The plan appears when it is complete. After an interruption run the same command again; the result is the same, byte for byte.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import numpy as np

from megacp.data.dataset import PARTS, split_documents
from megacp.data.document_groups import groups_beside, read_groups
from megacp.data.histogram import check_picture, draw, fill_histogram, length_histogram, text_table
from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.manifest import check_tokenizer
from megacp.data.packing import Accounting, Packing, pack
from megacp.data.packing_plan import PackingPlan, describe_datasets, is_plan, read_meta, write_plan
from megacp.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megacp.data.verification import common_tokenizer


def document_groups(args: argparse.Namespace, datasets: list[IndexedDataset]) -> np.ndarray | None:
    """A number for each document of all datasets, equal for those of one group; None without --group-by and --groups."""
    if args.group_by is None and args.groups is None:
        return None
    files = args.groups or [groups_beside(indexed.prefix) for indexed in datasets]
    if len(files) != len(datasets):
        raise DatasetError(f"--groups: {len(files)} files for {len(datasets)} --input datasets; give one for each, in their order")
    if not any(files):
        raise DatasetError(
            f"--group-by {args.group_by} needs a line for each document: {datasets[0].prefix}.groups does not exist; "
            "preprocess_data.py --write-groups writes it, or name a file with --groups FILE"
        )
    groups, first = [], 0
    for indexed, path in zip(datasets, files):
        alone = -1 - np.arange(indexed.num_documents, dtype=np.int64)
        mine = alone if path is None else read_groups(path, indexed.num_documents, args.group_by or "key")
        groups.append(np.where(mine < 0, mine - first, mine))  # documents without a group stay alone across datasets
        first += indexed.num_documents
    return np.concatenate(groups)


def chosen_documents(args: argparse.Namespace, datasets: list[IndexedDataset]) -> np.ndarray:
    """Numbers, over all datasets, of the documents to pack: all, or --part of --split of each dataset."""
    chosen, first = [], 0
    for indexed in datasets:
        low, high = 0, indexed.num_documents
        if args.part:
            low, high = split_documents(args.split, indexed.num_documents)[args.part]
        chosen.append(np.arange(first + low, first + high))
        first += indexed.num_documents
    return np.concatenate(chosen)


def special_ids(args: argparse.Namespace, datasets: list[IndexedDataset]) -> tuple[int | None, int]:
    """(separator or None, padding) as token ids."""
    prefixes = [indexed.prefix for indexed in datasets]
    named = common_tokenizer(prefixes) or {}
    if args.tokenizer_type or args.tokenizer_model:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
        check_tokenizer("--input", prefixes, tokenizer, args.tokenizer_model)
        named = {"eod": tokenizer.eod, "bos": tokenizer.bos, "vocab_size": tokenizer.vocab_size}
    separator = args.separator
    if separator in ("eod", "bos"):
        if named.get(separator) is None:
            reason = f"the tokenizer has no {separator}" if named else "needs the --tokenizer-model (or --tokenizer-type Byte)"
            raise DatasetError(f"--separator {separator}: {reason}; a token id such as 2 works")
        separator = named[separator]
    for flag, token in (("separator", separator), ("padding-id", args.padding_id)):
        if token is not None and "vocab_size" in named and token >= named["vocab_size"]:
            known = f"the tokenizer has the ids 0 to {named['vocab_size'] - 1}"
            raise DatasetError(f"--{flag} {token}: {known}; {named['eod'] or 0} works")
    padding = args.padding_id if args.padding_id is not None else named.get("eod")
    if padding is None:
        padding = next((last_token(indexed) for indexed in datasets if indexed.num_tokens), 0)
    return separator, padding


def last_token(indexed: IndexedDataset) -> int:
    """Of the first document with text: its end-of-document token, when it was preprocessed with --append-eod."""
    sequence = int(np.flatnonzero(indexed.sequence_lengths)[0])
    length = int(indexed.sequence_lengths[sequence])
    return int(indexed.read(sequence, length - 1, length)[0])


def make_plan(args: argparse.Namespace) -> None:
    """Pack and write, unless this very plan is there. Raises DatasetError."""
    started = time.monotonic()
    if args.histogram:
        check_picture(args.histogram)
    if Path(f"{args.output}.idx").exists():
        raise DatasetError(
            f"--output {args.output} is the prefix of a dataset, which --data-path would no longer read; name another folder"
        )
    datasets = [IndexedDataset(prefix) for prefix in args.input]
    groups = document_groups(args, datasets)
    separator, padding = special_ids(args, datasets)
    described = describe_datasets(datasets, args.output)
    options = {
        "group_by": None if groups is None else args.group_by or "key",
        "groups_sha256": None if groups is None else hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest(),
        "split": args.split if args.part else None,
        "part": args.part,
        "drop_shorter_than": args.drop_shorter_than,
        "min_fill": args.min_fill,
    }
    output = Path(args.output)
    if output.exists():
        meta = read_meta(output)
        wanted = {
            "seq_length": args.seq_length, "separator": separator, "padding": padding, "datasets": described, "options": options,
        }  # fmt: skip
        other = [name for name, value in wanted.items() if meta[name] != value]
        if other:
            differing = ", ".join(other)
            raise DatasetError(f"--output {output} holds another plan ({differing} differ); remove it or name another folder")
        print(f"{output} is there already, complete and of these documents and options")
        report(PackingPlan(output), Accounting(**meta["counts"]), args.histogram)
        return

    chosen = chosen_documents(args, datasets)
    lengths = np.concatenate([indexed.document_lengths for indexed in datasets])[chosen]
    packing = pack(
        lengths, args.seq_length, groups=None if groups is None else groups[chosen], separator=separator is not None,
        drop_shorter_than=args.drop_shorter_than, min_fill=args.min_fill,
    )  # fmt: skip
    if not packing.accounting.sequences:
        raise DatasetError(
            f"--input {' '.join(args.input)}: no sequence to plan; {packing.accounting.documents:,} documents with "
            f"{packing.accounting.document_tokens:,} tokens, of which {packing.accounting.short_tokens:,} are left out by "
            f"--drop-shorter-than and {packing.accounting.emptier_tokens:,} by --min-fill"
        )
    packing = Packing(**{**vars(packing), "documents": chosen[packing.documents]})
    output.parent.mkdir(parents=True, exist_ok=True)
    write_plan(output, packing, described, separator=separator, padding=padding, options=options)
    report(PackingPlan(output), packing.accounting, args.histogram)
    print(f"wrote {output} in {time.monotonic() - started:.1f} s; train with --data-path {output} --seq-length {args.seq_length}")


def report(plan: PackingPlan, counts: Accounting, picture: str | None) -> None:
    """Where every token went, how full sequences are, how long the pieces in them."""
    counts.check()
    positions = counts.sequences * counts.seq_length
    whole = counts.documents - counts.empty_documents - counts.split_documents - counts.short_documents
    print(f"{counts.sequences:,} sequences of {counts.seq_length:,} tokens, {1 - counts.padding_tokens / positions:.3%} filled")
    print(
        f"documents  {counts.documents:,} = {whole:,} that fit + {counts.split_documents:,} split "
        f"+ {counts.empty_documents:,} empty + {counts.short_documents:,} dropped as short"
    )
    print(
        f"tokens     {counts.document_tokens:,} = {counts.packed_tokens:,} packed + {counts.short_tokens:,} dropped as short (with "
        f"{counts.short_rests:,} rests) + {counts.emptier_tokens:,} in {counts.emptier_sequences:,} sequences below --min-fill"
    )
    print(
        f"positions  {positions:,} = {counts.packed_tokens:,} packed + {counts.separator_tokens:,} separators "
        f"+ {counts.padding_tokens:,} padding (token {plan.padding}, no labels)"
    )
    work = counts.attention_pairs / (counts.sequences * counts.seq_length**2)
    print(f"attention  {work:.2%} of the work of sequences that are one document each (--attention-mask document)")
    fills, lengths = fill_histogram(plan.filled, plan.seq_length), length_histogram(plan.piece_lengths())
    print("\n".join(["", *text_table(fills, "filled", "sequences"), "", *text_table(lengths, "tokens of a piece", "pieces"), ""]))
    if picture:
        title = f"{plan.folder.name}: {counts.sequences:,} sequences of {counts.seq_length:,} tokens"
        draw(picture, title, [("filled", "sequences", fills), ("tokens of a piece", "pieces", lengths)])
        print(f"wrote {picture}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PREFIX", help="datasets of preprocess_data.py; their documents are mixed")
    add("--output", required=True, metavar="PLAN", help="the folder to write")
    add("--seq-length", type=int, required=True, metavar="TOKENS", help="of training; up to 16,777,216 and more")
    add("--separator", metavar="eod|bos|ID", help="a token between the pieces of a sequence (default: none)")
    add("--padding-id", type=int, metavar="ID", help="fills sequences, never has a label (default: eod; of a dataset "
        "without manifest or tokenizer the token that ends its first document)")  # fmt: skip
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="tells eod and bos (default: from the datasets' manifests)")
    add("--tokenizer-model", metavar="FILE", help="as for preprocess_data.py; checked against the manifests")
    add("--group-by", metavar="RULE", help="keep together by key, path:N or field:NAME (default: key with --groups)")
    add("--groups", nargs="+", metavar="FILE", help="one for each --input instead of PREFIX.groups")
    add("--split", default="969,30,1", metavar="A,B,C", help="shares of documents, with --part (default: %(default)s)")
    add("--part", choices=PARTS, help="plan only these documents, the ones that training without a plan takes (default: all)")
    add("--drop-shorter-than", type=int, default=0, metavar="TOKENS", help="leave out documents and rests with fewer (default: 0)")
    add("--min-fill", type=float, default=0.0, metavar="F", help="leave out sequences filled to less than this part (default: 0)")
    add("--histogram", metavar="FILE.png", help="also draw the histograms")
    args = parser.parse_args(argv)
    if args.seq_length < 1:
        parser.error(f"--seq-length {args.seq_length} must be at least 1")
    if not 0 <= args.drop_shorter_than <= args.seq_length:
        parser.error(f"--drop-shorter-than {args.drop_shorter_than} must be from 0 to --seq-length {args.seq_length}")
    if not 0 <= args.min_fill <= 1:
        parser.error(f"--min-fill {args.min_fill} must be from 0 to 1")
    if args.padding_id is not None and args.padding_id < 0:
        parser.error(f"--padding-id {args.padding_id} must be a token id, 0 or more")
    if args.separator is not None and args.separator not in ("eod", "bos"):
        if not args.separator.isdecimal():
            parser.error(f"--separator {args.separator} must be eod, bos or a token id such as 2")
        args.separator = int(args.separator)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        make_plan(args)
    except (DatasetError, OSError) as error:
        state = "" if is_plan(args.output) else f"\nNothing was written under {args.output}."
        sys.exit(f"pack_documents: {error}{state}")


if __name__ == "__main__":
    main()
