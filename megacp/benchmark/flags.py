"""Types of the benchmark's flags, and what they must satisfy together.

>>> token_count("128K"), token_count("1M"), token_count("5000")
(131072, 1048576, 5000)
>>> query_chunk("all") is None
True
"""

import argparse
import itertools
import re

from megacp.argument_checks import ArgumentError
from megacp.context_parallel.head_schedule import check_heads
from megacp.model.config import ModelConfig

UNITS = {"": 1, "K": 2**10, "M": 2**20}


def token_count(text: str) -> int:
    """A number of tokens: 131072, 128K (of 1,024) or 1M (of 1,048,576)."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; 131072, 128K or 1M are")
    return int(match[1]) * UNITS[match[2]]


def short_tokens(tokens: int) -> str:
    """The other way: 131072 is 128K, 1000 is 1000."""
    for letter in ("M", "K"):
        if tokens % UNITS[letter] == 0:
            return f"{tokens // UNITS[letter]}{letter}"
    return str(tokens)


def query_chunk(text: str) -> int | None:
    """Tokens of a query chunk; `all`: queries are not chunked."""
    if text == "all":
        return None
    try:
        return token_count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a query chunk; all or a number of tokens such as 16K is") from None


def heads_per_stage(text: str) -> int | None:
    """Query heads a stage; `a2a`: all heads in one stage, plain Ulysses."""
    if text == "a2a":
        return None
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of heads; a2a (all heads at once) or a number such as 8 is")
    return int(text)


def head_shape(text: str) -> tuple[int, int]:
    """`4:1`: four query heads on one key/value head."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not int(match[1]) or not int(match[2]) or int(match[1]) % int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY:KV heads, the second dividing the first; 1:1 or 4:1 is")
    return int(match[1]), int(match[2])


def stage_sizes(wanted: list[int | None], config: ModelConfig) -> list[int]:
    """Query heads a stage, each once; None becomes all of the model's."""
    return list(dict.fromkeys(heads or config.num_attention_heads for heads in wanted))


def check_ranks(config: ModelConfig, ranks: int, stages: list[int], lengths: list[int]) -> None:
    """Raises ArgumentError when heads or tokens do not divide over the ranks."""
    for heads in stages:
        try:
            check_heads(config.num_attention_heads, config.num_query_groups, ranks, heads)
        except ValueError as error:  # it names the flags of pretrain_llama.py
            text = str(error).replace("--context-parallel-size", "--ranks").replace("--upipe-heads-per-stage", "--heads-per-stage")
            raise ArgumentError(text) from None
    for length in lengths:
        if length % ranks:
            near = max(ranks, length // ranks * ranks)
            raise ArgumentError(f"--seq-length {length} is not a multiple of --ranks {ranks}; {near} is")


def check_documents(documents: list[int], lengths: list[int]) -> None:
    """Raises ArgumentError when a stream has fewer tokens than documents."""
    for number, length in itertools.product(documents, lengths):
        if number > length:
            raise ArgumentError(f"--documents {number} are more than --seq-length {length} has tokens; {length} or fewer work")
