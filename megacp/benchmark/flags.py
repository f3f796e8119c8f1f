"""Types of the benchmark's flags.

>>> token_count("128K"), token_count("1M"), token_count("5000")
(131072, 1048576, 5000)
>>> query_chunk("all") is None
True
"""

import argparse
import re

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
