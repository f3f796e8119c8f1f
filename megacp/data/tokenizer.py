"""Text to token ids and back: --tokenizer-model, and --tokenizer-type where the file does not tell.

    SentencePiece  a .model file (Llama 2, Mistral, tools/train_tokenizer.py); eod is the model's eos
    HuggingFace    a tokenizer.json or its folder (Llama 3, Qwen3); eod is its end-of-text token
    Tiktoken       Llama 3's tokenizer.model of `base64 rank` lines
    Byte           no model: ids 0..255 are the bytes of UTF-8, 256 begins a text (bos), 257 ends a document (eod)

    >>> tokenizer = build_tokenizer("Byte")
    >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169]), tokenizer.vocab_size
    ([104, 195, 169], 'hé', 258)

`encode` adds neither bos nor eod, and a text that spells a special token ("</s>", "<|endoftext|>") is only text: a document
cannot forge a border. Long texts are cut where no token can span the cut (`safe_cuts`), so ids do not change. A text that comes in
pieces is encoded with `encode_piece`.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from megacp.data.indexed_dataset import DatasetError
from megacp.data.safe_cuts import PIECE_CHARS, STRETCH_CHARS, Cuts, anywhere, pieces

TOKENIZER_TYPES = ("SentencePiece", "HuggingFace", "Tiktoken", "Byte")


class Tokenizer(ABC):
    """vocab_size is one more than the largest id, special tokens included; bos and pad are None where the vocabulary has none.

    `cuts`: where a text may be cut. `fingerprint`: SHA-256 of the model file, what tells one tokenizer from another.
    """

    type: str
    vocab_size: int
    bos: int | None
    eod: int
    pad: int | None
    cuts: Cuts
    fingerprint: str

    @abstractmethod
    def encode_piece(self, text: str, first: bool) -> list[int]:
        """The ids of one piece that `pieces(..., self.cuts)` made; `first`: it begins the document."""

    @abstractmethod
    def decode_piece(self, ids: list[int], first: bool) -> str:
        """The text of one piece."""

    def encode(self, text: str, piece_chars: int = PIECE_CHARS, limit: int = STRETCH_CHARS) -> list[int]:
        """Raises StretchTooLong where no cut is safe for more than `limit` characters."""
        ids = []
        for piece in pieces([text], self.cuts, piece_chars, limit):
            ids += self.encode_piece(piece.text, piece.first)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_piece(list(ids), first=True)

    def __str__(self) -> str:
        """`Tiktoken, 128,256 ids, bos 128000, eod 128001, pad 128004`"""
        named = [f"{name} {getattr(self, name)}" for name in ("bos", "eod", "pad") if getattr(self, name) is not None]
        return ", ".join([self.type, f"{self.vocab_size:,} ids", *named])


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8. No model, no unknown text; four times the tokens of a trained vocabulary."""

    type, vocab_size, bos, eod, pad = "Byte", 258, 256, 257, None
    cuts = staticmethod(anywhere)
    fingerprint = hashlib.sha256(b"Byte").hexdigest()

    def encode_piece(self, text: str, first: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def decode_piece(self, ids: list[int], first: bool) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def build_tokenizer(tokenizer_type: str | None, tokenizer_model: str | None = None) -> Tokenizer:
    """Without a type the file tells it. Raises DatasetError naming --tokenizer-type or --tokenizer-model."""
    if tokenizer_type is not None and tokenizer_type not in TOKENIZER_TYPES:
        raise DatasetError(f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type == "Byte":
        if tokenizer_model is not None:
            raise DatasetError(
                f"--tokenizer-model {tokenizer_model} contradicts --tokenizer-type Byte, which has no model; one of them works"
            )
        return ByteTokenizer()
    if tokenizer_model is None:
        given = f"--tokenizer-type {tokenizer_type} needs" if tokenizer_type else "no --tokenizer-type Byte, and no"
        wanted = {
            "SentencePiece": "a .model file",
            "HuggingFace": "a tokenizer.json or the folder that holds it",
            "Tiktoken": "Llama 3's tokenizer.model",
        }.get(tokenizer_type, "a tokenizer.model, a tokenizer.json or a folder with one")
        raise DatasetError(f"{given} --tokenizer-model, {wanted}")
    path = _model_file(tokenizer_type, Path(tokenizer_model))
    return _class_of(tokenizer_type or tokenizer_type_of(path))(path)


def tokenizer_type_of(path: Path) -> str:
    """The type by the file's first bytes. Raises DatasetError."""
    with open(path, "rb") as file:
        head = file.read(256)
    if head.lstrip().startswith(b"{"):
        return "HuggingFace"
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", head):
        return "Tiktoken"
    if head.startswith(b"\n"):  # field 1 of the protocol buffer: the first piece
        return "SentencePiece"
    raise DatasetError(
        f"--tokenizer-model {path}: neither a tokenizer.json, nor a SentencePiece model, nor lines of `base64 rank`; it begins with "
        f"{head[:16]!r}"
    )


def file_fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _model_file(tokenizer_type: str | None, path: Path) -> Path:
    """The file, in a folder the one that is there. Raises DatasetError."""
    if path.is_dir():
        names = {"HuggingFace": ["tokenizer.json"], None: ["tokenizer.json", "tokenizer.model"]}.get(
            tokenizer_type, ["tokenizer.model"]
        )
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise DatasetError(
                f"--tokenizer-model {path}: {path / names[0]} is not a file" + "; nor is tokenizer.model" * (len(names) > 1)
            )
        return found[0]
    if not path.is_file():
        raise DatasetError(f"--tokenizer-model {path} is not a file")
    return path


def _class_of(tokenizer_type: str) -> type[Tokenizer]:
    if tokenizer_type == "SentencePiece":  # imported here: a run needs only the library of its own tokenizer
        from megacp.data.tokenizer_sentencepiece import SentencePieceTokenizer as wanted
    elif tokenizer_type == "HuggingFace":
        from megacp.data.tokenizer_huggingface import HuggingFaceTokenizer as wanted
    else:
        from megacp.data.tokenizer_tiktoken import TiktokenTokenizer as wanted
    return wanted
