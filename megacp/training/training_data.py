"""Opens what --data-path, --train-data-path or --mock-data names, and the tokenizer that says where documents end.

    data = open_training_data(args, config)
    data.train.tokens(0, 0, 8), data.eod, data.vocab_size          # eod None, vocab_size 0: no tokenizer given
    data.valid, data.test                                          # None without --eval-interval
"""

import argparse
from dataclasses import dataclass

from megacp.data.dataset import (
    MockDataset, SequenceDataset, build_dataset, build_datasets, data_fingerprint, dataset_prefixes,
)  # fmt: skip
from megacp.data.indexed_dataset import DatasetError
from megacp.data.manifest import check_tokenizer
from megacp.data.tokenizer import build_tokenizer
from megacp.model.config import ModelConfig


@dataclass(frozen=True)
class TrainingData:
    """`vocab_size`: ids of the tokenizer. `description`, `without_test`: for the log; the latter says why `test` is None."""

    train: SequenceDataset
    eod: int | None
    vocab_size: int
    description: str
    valid: SequenceDataset | None = None
    test: SequenceDataset | None = None
    without_test: str = ""
    train_path: tuple[str, ...] = ()  # empty: mock data

    def fingerprint(self) -> str | None:
        """Of the training data's files (`data_fingerprint`); None of mock data."""
        return data_fingerprint(list(self.train_path)) if self.train_path else None


def open_training_data(args: argparse.Namespace, config: ModelConfig) -> TrainingData:
    """Raises DatasetError (a ValueError) naming the file or flag when the data cannot be used."""
    if args.mock_data:
        train, valid, test = (MockDataset(config.vocab_size, args.seq_length, args.seed + part) for part in range(3))
        description = f"mock documents, seed {args.seed}"
        return TrainingData(train, train.eod, 0, description, *((valid, test) if args.eval_interval else ()))
    eod, vocab_size = None, 0
    if args.tokenizer_type or args.tokenizer_model:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if path := getattr(args, name):
                check_tokenizer(f"--{name.replace('_', '-')}", dataset_prefixes(path), tokenizer, args.tokenizer_model)
        eod, vocab_size = tokenizer.eod, tokenizer.vocab_size
    if args.train_data_path:
        train = build_dataset(args.train_data_path, args.seq_length, args.seed)
    else:
        train, _, _ = build_datasets(args.data_path, args.split, args.seq_length, args.seed, parts=("train",))
    description = f"{' '.join(args.train_data_path or args.data_path)}: {len(train):,} sequences an epoch, seed {args.seed}"
    held_out = _open_held_out(args) if args.eval_interval else ()
    return TrainingData(train, eod, vocab_size, description, *held_out, train_path=tuple(args.train_data_path or args.data_path))


def _open_held_out(args: argparse.Namespace) -> tuple[SequenceDataset, SequenceDataset | None, str]:
    """Validation, test or None, and why there is no test."""
    if args.train_data_path:
        valid = build_dataset(args.valid_data_path, args.seq_length, args.seed)
        if args.test_data_path:
            return valid, build_dataset(args.test_data_path, args.seq_length, args.seed), ""
        return valid, None, "no --test-data-path"
    split = args.data_path, args.split, args.seq_length, args.seed
    try:
        _, valid, _ = build_datasets(*split, parts=("valid",))
    except DatasetError as error:
        raise DatasetError(f"--eval-interval {args.eval_interval} has nothing to evaluate: {error}") from None
    try:  # the default --split asks for a test, which small data cannot give
        _, _, test = build_datasets(*split, parts=("test",))
    except DatasetError as error:
        return valid, None, str(error)
    return valid, test, "" if test else f"--split {args.split} gives it no share"
