"""Llama 3's tokenizer.model: a line `base64 rank` for each token, the pattern that splits text and the special tokens known by name.

    IQ== 0          "!" is id 0, and the BPE merge of lowest rank comes first
    Ig== 1          128,000 such lines, then 256 special tokens: 128,256 ids

The table of Qwen (151,643 lines) is read too. Other tables are refused, for nothing in them tells how to split text.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

import regex
import tiktoken

from megacp.data.indexed_dataset import DatasetError
from megacp.data.safe_cuts import byte_level_cuts
from megacp.data.split_patterns import LLAMA3, QWEN
from megacp.data.tokenizer import Tokenizer, file_fingerprint

# The regex engine inside tiktoken keeps a step of its way back for each blank of a run, and panics at a million of them.
_BLANKS_FOR_TIKTOKEN = 400_000


@dataclass(frozen=True)
class _Family:
    pattern: str
    special_tokens: list[str]  # in the order of their ids, after the ranks
    bos: str | None
    eod: str
    pad: str


def _llama3_special_tokens() -> list[str]:
    """Llama 3.1's names; Llama 3 calls 128004, 5, 8 and 10 reserved. The ids are the same."""
    named = {
        0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 5: "<|step_id|>", 6: "<|start_header_id|>",
        7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
    }  # fmt: skip
    unnamed = iter(range(256))
    return [named.get(i) or f"<|reserved_special_token_{next(unnamed)}|>" for i in range(256)]


_FAMILIES = {
    128_000: _Family(LLAMA3, _llama3_special_tokens(), "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
    151_643: _Family(QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|endoftext|>", "<|endoftext|>"),
}


class TiktokenTokenizer(Tokenizer):
    type = "Tiktoken"

    def __init__(self, path: Path):
        ranks = _read_ranks(path)
        family = _FAMILIES.get(len(ranks))
        if family is None or sorted(ranks.values()) != list(range(len(ranks))):
            known = " or ".join(f"{count:,}" for count in _FAMILIES)
            raise DatasetError(
                f"--tokenizer-model {path}: {len(ranks):,} ranks up to {max(ranks.values(), default=0):,}, expected {known} in a row "
                "(Llama 3, Qwen); of another tokenizer take the tokenizer.json"
            )
        special = {name: len(ranks) + i for i, name in enumerate(family.special_tokens)}
        self._encoding = tiktoken.Encoding(path.name, pat_str=family.pattern, mergeable_ranks=ranks, special_tokens=special)
        self._split = regex.compile(family.pattern)
        self.vocab_size = len(ranks) + len(special)
        self.bos = special.get(family.bos)
        self.eod, self.pad = special[family.eod], special[family.pad]
        self.fingerprint = file_fingerprint(path)
        self.cuts = byte_level_cuts(line_ends=True)

    def encode_piece(self, text: str, first: bool) -> list[int]:
        if len(text) > _BLANKS_FOR_TIKTOKEN and re.search(rf"\s{{{_BLANKS_FOR_TIKTOKEN}}}", text):
            words = (word.group().encode("utf-8") for word in self._split.finditer(text))
            return [i for word in words for i in self._encoding._core_bpe.encode_single_piece(word)]
        return self._encoding.encode_ordinary(text)

    def decode_piece(self, ids: list[int], first: bool) -> str:
        return self._encoding.decode(ids)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """{token: rank}. (tiktoken's own reader keeps a copy by path, and returns it when the file has changed.)"""
    ranks = {}
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise DatasetError(f"--tokenizer-model {path}: line {number} is not `base64 rank`: {line[:40]!r}") from error
    return ranks
