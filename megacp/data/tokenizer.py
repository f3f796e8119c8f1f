"""Text to token ids and back: --tokenizer-type and --tokenizer-model.

    Byte           no model: ids 0..255 are the bytes of UTF-8, 256 begins a text (bos), 257 ends a document (eod)
    SentencePiece  a .model file (Llama 2, Mistral, tools/train_tokenizer.py); eod is the model's eos
    HuggingFace    a tokenizer.json or its folder (Llama 3, Qwen3); eod is its end-of-text token

    >>> tokenizer = build_tokenizer("Byte")
    >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169]), tokenizer.vocab_size
    ([104, 195, 169], 'hé', 258)

`encode` adds neither bos nor eod, and a text that spells a special token ("</s>", "<|endoftext|>") is only text: a document
cannot forge a border. Long texts are cut where no token can span the cut (`safe_cuts`), so ids do not change.
"""

import json
from pathlib import Path
from typing import Protocol

from megacp.data.indexed_dataset import DatasetError
from megacp.data.safe_cuts import pieces

TOKENIZER_TYPES = ("SentencePiece", "HuggingFace", "Byte")
# Tokens that end a document in pre-training, by the names of Llama 3, Qwen and GPT, Llama 2, Gemma. An instruct model's
# tokenizer_config.json names the end of a turn instead (<|eot_id|>, <|im_end|>), so it is asked last.
_END_OF_DOCUMENT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_BEGIN_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>")
# Pre-tokenizers that end a token between a line feed and text, and before it see no further than that line feed.
_SPLITS_OF_LLAMA3_AND_QWEN = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]


class Tokenizer(Protocol):
    """vocab_size is one more than the largest id; bos is None for a vocabulary without one."""

    vocab_size: int
    bos: int | None
    eod: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None = None) -> Tokenizer:
    """Raises DatasetError naming --tokenizer-type or --tokenizer-model."""
    if tokenizer_type not in TOKENIZER_TYPES:
        raise DatasetError(f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type == "Byte":
        return ByteTokenizer()
    if tokenizer_model is None:
        wanted = "a .model file" if tokenizer_type == "SentencePiece" else "a tokenizer.json or the folder that holds it"
        raise DatasetError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model, {wanted}")
    path = Path(tokenizer_model)
    if tokenizer_type == "HuggingFace" and path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DatasetError(f"--tokenizer-model {tokenizer_model}: {path} is not a file")
    return SentencePieceTokenizer(path) if tokenizer_type == "SentencePiece" else HuggingFaceTokenizer(path)


class ByteTokenizer:
    """One token per byte of UTF-8. No model, no unknown text; four times the tokens of a trained vocabulary."""

    vocab_size, bos, eod = 258, 256, 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model, BPE or unigram."""

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor  # here: a run on mock data needs no tokenizer library

        try:
            self._model = SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise DatasetError(f"--tokenizer-model {path}: not a SentencePiece model ({error})") from error
        self.vocab_size = self._model.vocab_size()
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise DatasetError(f"--tokenizer-model {path} has no end-of-sentence piece, which ends documents; train it with one")
        self._cuttable = self._line_feed_stands_alone()

    def _line_feed_stands_alone(self) -> bool:
        """Only the piece "\\n" holds a line feed, and no dummy prefix marks where a text begins."""
        model = self._model
        with_line_feed = [i for i in range(self.vocab_size) if "\n" in model.id_to_piece(i)]
        return model.encode("a\na") == [*model.encode("a"), *with_line_feed, *model.encode("a")]

    def encode(self, text: str) -> list[int]:
        if not self._cuttable:
            return self._model.encode(text)
        return [i for piece in pieces(text) for i in self._model.encode(piece)]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(list(ids))


class HuggingFaceTokenizer:
    """A tokenizer.json. bos and eod are looked up by name, then in the tokenizer_config.json beside it."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as TokenizerJson

        try:
            self._model = TokenizerJson.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DatasetError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from error
        self._model.encode_special_tokens = True  # the text of a special token is text
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        configured = _special_tokens(path.with_name("tokenizer_config.json"))
        names_of_bos = (*_BEGIN_OF_TEXT, configured.get("bos_token"))
        names_of_eod = (*_END_OF_DOCUMENT, configured.get("eos_token"))
        self.bos = next((vocabulary[name] for name in names_of_bos if name in vocabulary), None)
        self.eod = next((vocabulary[name] for name in names_of_eod if name in vocabulary), None)
        if self.eod is None:
            raise DatasetError(
                f"--tokenizer-model {path}: no token ends a document; looked for {', '.join(_END_OF_DOCUMENT)} and for eos_token "
                "in tokenizer_config.json beside it"
            )
        self._cuttable = _splits_after_line_feed(json.loads(self._model.to_str()))

    def encode(self, text: str) -> list[int]:
        parts = pieces(text) if self._cuttable else [text]
        return [i for part in parts for i in self._model.encode(part, add_special_tokens=False).ids]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=False)


def _special_tokens(config: Path) -> dict[str, str]:
    """{"bos_token": text, "eos_token": text} as far as the config names them; a token is a string or {"content": string}."""
    if not config.is_file():
        return {}
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{config}: not JSON ({error})") from error
    named = {key: fields.get(key) for key in ("bos_token", "eos_token")}
    named = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items()}
    return {key: token for key, token in named.items() if token is not None}


def _splits_after_line_feed(tokenizer_json: dict) -> bool:
    """Byte-level with the pre-tokenizer of Llama 3 or Qwen: no token spans a line feed and a following character."""
    for token in tokenizer_json["added_tokens"]:
        if not token["special"] and ("\n" in token["content"] or token["lstrip"]):
            return False
    if tokenizer_json["normalizer"] not in (None, {"type": "NFC"}):
        return False
    outer = tokenizer_json["pre_tokenizer"] or {}
    steps = outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        split["pattern"].get("Regex") in _SPLITS_OF_LLAMA3_AND_QWEN
        and (split["behavior"], split["invert"]) == ("Isolated", False)
        and (byte_level["add_prefix_space"], byte_level["use_regex"]) == (False, False)
    )
