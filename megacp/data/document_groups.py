"""Which documents belong together: a file with one line for each document of a dataset, in their order.

    corpus.groups                      --group-by key    path:1    path:2
    web/shop/cart.py                   3 groups          web       web/shop
    web/shop/cart_test.py                                web       web/shop
    web/blog/post.py                                     web       web/blog

    pages.jsonl                        --group-by field:site
    {"site": "a.org", "n": 1}          a.org
    {"site": null}                     a group of its own, as is an empty line

Keys become 64-bit numbers (BLAKE2), so ten million of them take 80 MB; that two of those collide has a chance of 1 in 10^5, and
would only keep two groups together.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

from megacp.data.indexed_dataset import DatasetError

RULES = "key, path:N or field:NAME"


def groups_beside(prefix: str) -> Path | None:
    """PREFIX.groups, when there is one."""
    path = Path(f"{prefix}.groups")
    return path if path.is_file() else None


def read_groups(path: str | os.PathLike, num_documents: int, group_by: str = "key") -> np.ndarray:
    """int64 [documents]: equal numbers for documents of one group, negative ones for documents that have none.

    group_by: "key", the whole line; "path:N", its first N folders; "field:NAME", that field of a line of JSON. Raises
    DatasetError naming --group-by or the file and line.
    """
    rule, _, argument = group_by.partition(":")
    if not re.fullmatch(r"key|path:0*[1-9][0-9]*|field:.+", group_by):
        raise DatasetError(f"--group-by {group_by}: takes {RULES}, such as path:2 (the first two folders) or field:repository")
    groups, number = np.empty(num_documents, dtype=np.int64), 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number > num_documents:
                break
            key = line.rstrip(b"\r\n")
            if rule == "path":
                key = b"/".join([part for part in key.split(b"/")[:-1] if part not in (b"", b".")][: int(argument)])
            elif rule == "field":
                key = _field(path, number, key, argument)
            groups[number - 1] = _number(key) if key else -number
    if number != num_documents:
        more = "more" if number > num_documents else f"{number}"
        raise DatasetError(f"{path}: expected a line for each of the {num_documents} documents, found {more}; another dataset's?")
    return groups


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def _field(path: str | os.PathLike, number: int, line: bytes, name: str) -> bytes:
    try:
        fields = json.loads(line) if line else {name: None}
        value = fields[name]
    except (ValueError, TypeError, KeyError):
        shown = line[:60].decode("utf-8", "replace")
        raise DatasetError(f"{path}: line {number} is no JSON with a field {name!r} (--group-by field:{name}): {shown}") from None
    return b"" if value is None else json.dumps(value, sort_keys=True).encode()
