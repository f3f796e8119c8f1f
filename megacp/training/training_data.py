"""Opens what --data-path, --train-data-path or --mock-data names, and the tokenizer that says where documents end.

    data = open_training_data(args, config)
    data.train.tokens(0, 0, 8), data.eod, data.vocab_size          # eod None, vocab_size 0: no tokenizer given
"""

import argparse
from dataclasses import dataclass

from megacp.data.dataset import MockDataset, SequenceDataset, build_dataset, build_datasets
from megacp.data.tokenizer import build_tokenizer
from megacp.model.config import ModelConfig


@dataclass(frozen=True)
class TrainingData:
    """`vocab_size`: ids of the tokenizer. `description`: one line for the log."""

    train: SequenceDataset
    eod: int | None
    vocab_size: int
    description: str


def open_training_data(args: argparse.Namespace, config: ModelConfig) -> TrainingData:
    """Raises DatasetError (a ValueError) naming the file or flag when the data cannot be used."""
    if args.mock_data:
        dataset = MockDataset(config.vocab_size, args.seq_length, args.seed)
        return TrainingData(dataset, dataset.eod, 0, f"mock documents, seed {args.seed}")
    eod, vocab_size = None, 0
    if args.tokenizer_type:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
        eod, vocab_size = tokenizer.eod, tokenizer.vocab_size
    if args.train_data_path:
        train = build_dataset(args.train_data_path, args.seq_length, args.seed)
    else:
        train, _, _ = build_datasets(args.data_path, args.split, args.seq_length, args.seed, parts=("train",))
    description = f"{' '.join(args.train_data_path or args.data_path)}: {len(train):,} sequences an epoch, seed {args.seed}"
    return TrainingData(train, eod, vocab_size, description)
