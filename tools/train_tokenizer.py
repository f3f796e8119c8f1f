"""Train a SentencePiece tokenizer that keeps every character: line feeds, tabs, indentation, any Unicode (as bytes where rare).

    python tools/train_tokenizer.py --input corpus.jsonl --output-prefix data/tokenizer --vocab-size 4096

writes data/tokenizer.model, for --tokenizer-type SentencePiece --tokenizer-model data/tokenizer.model. 12 MB of Python sources
take about two seconds with bpe, a minute with unigram.

The text is not normalised, no space is put in front, runs of spaces may be pieces ("        return" is two), "\\n" and "\\t" are
pieces of their own, and a character without a piece becomes its UTF-8 bytes. Only U+2581, SentencePiece's own sign for a space,
comes back as a space.
"""

import argparse
import io
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from megacp.data.indexed_dataset import DatasetError
from megacp.data.packing_plan import check_output_prefix
from megacp.data.raw_documents import ERRORS, decode, find_sources, read_documents

LINE_CHARS = 4000  # a longer line is given to the trainer in parts, which would otherwise leave it out


def training_lines(args: argparse.Namespace) -> Iterator[str]:
    """The lines of all documents. A line feed is a piece of its own, so no piece is learnt across it."""
    for raw in read_documents(find_sources(args.input, args.extensions), args.json_keys):
        for line in (decode(raw, args.errors, args.json_keys) or "").split("\n"):
            for start in range(0, len(line), LINE_CHARS):
                yield line[start : start + LINE_CHARS]


def draw(lines: Iterator[str], count: int, seed: int) -> list[str]:
    """At most `count` of the lines, each with the same chance, by `seed` alone (SentencePiece's own differs from run to run)."""
    generator, drawn = random.Random(seed), []
    for number, line in enumerate(lines):
        if number < count:
            drawn.append(line)
        elif (place := generator.randrange(number + 1)) < count:
            drawn[place] = line
    return drawn


def train(args: argparse.Namespace) -> bytes:
    """The model file's content. Raises DatasetError, of --vocab-size too where the text does not support it."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(draw(training_lines(args), args.max_lines, args.seed)),
            model_writer=model,
            model_type=args.model_type,
            vocab_size=args.vocab_size,
            character_coverage=args.character_coverage,
            shuffle_input_sentence=False,
            max_sentence_length=4 * LINE_CHARS,  # bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            user_defined_symbols=["\n", "\t"],
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DatasetError(_explain(str(error), args.vocab_size)) from error
    return model.getvalue()


def _explain(message: str, vocab_size: int) -> str:
    """SentencePiece's refusals of a vocabulary size, with the flag and a size that works."""
    if largest := re.search(r"value <= (\d+)", message):
        return f"--vocab-size {vocab_size} is more than this text has pieces for; {largest[1]} or less works"
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"--vocab-size {vocab_size} is too small for the bytes and characters of this text; more than {smallest[1]} works"
    return message


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="text files (a document each), .jsonl, .parquet, also .gz and .zst, folders of them"
    )
    parser.add_argument("--extensions", nargs="+", metavar="EXT", help="of a folder, only files that end so, such as .py .md")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="the text of a JSON line; several are joined"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.model")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="pieces, 256 bytes among them (default: 4096)")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="bpe trains 30 times faster (default)")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="P",
        help="share of the text whose characters get a piece of their own",
    )
    parser.add_argument(
        "--max-lines", type=int, default=2_000_000, metavar="N", help="lines to learn from, drawn from all by --seed"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of the draw of lines")
    parser.add_argument(
        "--errors", choices=ERRORS, default="strict", help="a document that is not UTF-8 or JSON: stop, mend or leave out"
    )
    args = parser.parse_args(argv)
    for flag in ("vocab_size", "max_lines"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least 1; {parser.get_default(flag)} works")
    if not 0 < args.character_coverage <= 1:
        parser.error(f"--character-coverage {args.character_coverage} must be above 0 and at most 1; 0.9995 works")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    started = time.monotonic()
    target = Path(f"{args.output_prefix}.model")
    try:
        check_output_prefix(args.output_prefix)
        if target.exists():
            raise DatasetError(f"--output-prefix {args.output_prefix}: {target} exists, and data may need it; name another prefix")
        model = train(args)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        temporary.write_bytes(model)
        os.replace(temporary, target)
    except (DatasetError, OSError) as error:
        sys.exit(f"train_tokenizer: {error}")
    print(f"wrote {target}: {args.vocab_size} pieces ({args.model_type}), {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
