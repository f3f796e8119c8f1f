"""The work of preprocessing, cut into tasks of about a megabyte that any number of workers do in any order.

    reader = TaskReader(sources, tokenizer, encoder)
    for task in reader:                    a Batch of documents, or a Part of a document too long for one task
        result = encode(encoder, task)     in a worker: the ids of each document, or why it is left out
        result.position                    where the input stands after it: what a checkpoint keeps

A long document is cut here at safe cuts, so workers share even a single huge one, and its ids come back in order.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megacp.data.indexed_dataset import DatasetError, best_dtype
from megacp.data.long_json_lines import string_spans
from megacp.data.partial_dataset import DIGEST_BYTES
from megacp.data.raw_documents import RawDocument, Source, decode, json_fields, text_chunks
from megacp.data.safe_cuts import Piece, pieces
from megacp.data.source_readers import open_source
from megacp.data.tokenizer import Tokenizer, build_tokenizer

TASK_BYTES = 1 << 20  # enough to hide the cost of sending a task to a worker
TASK_CHARS = 500_000  # of a part of a long document


@dataclass(frozen=True)
class Encoder:
    """What a worker needs; small, so that it travels with each task."""

    tokenizer_type: str | None
    tokenizer_model: str | None
    errors: str
    json_keys: tuple[str, ...]
    max_stretch_chars: int
    dedup: bool = False
    groups: bool = False
    check_round_trip: bool = False


@dataclass(frozen=True)
class Position:
    """Documents before this place: all of the sources before `source` and `documents` of it, whose content hashes to `sha256`."""

    source: int = 0
    documents: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Batch:
    documents: list[RawDocument]
    stored_bytes: int  # of the input files that are behind, from the start on
    position: Position


@dataclass(frozen=True)
class Part:
    """A piece of a long document. `failed`: it turned out that the document cannot be used, and this part ends it."""

    name: str
    piece: Piece
    is_last: bool
    stored_bytes: int
    position: Position | None = None  # None within the document, where no checkpoint can be
    digest: bytes | None = None  # of the whole text, in the last part
    group: str | None = None
    failed: bool = False


@dataclass
class Document:
    """The ids of a document or of a part of it. None: it is empty, or `skipped` because it cannot be used."""

    name: str
    begins: bool = True
    ends: bool = True
    ids: np.ndarray | None = None
    text_bytes: int = 0
    skipped: bool = False
    altered: bool = False  # the tokenizer does not give the text back
    digest: bytes | None = None
    group: str | None = None


@dataclass
class Result:
    position: Position | None
    stored_bytes: int
    documents: list[Document] = field(default_factory=list)


class TaskReader:
    """Iterates over the tasks from `start` on. `finished`: a record of each source from there that was read to its end, in order."""

    def __init__(self, sources: list[Source], tokenizer: Tokenizer, encoder: Encoder, start: Position = Position()):
        self.sources, self.start = sources, start
        self.finished: list[dict] = []
        self._finished_bytes = 0
        self._cuts, self._encoder = tokenizer.cuts, encoder

    def __iter__(self) -> Iterator[Batch | Part]:
        batch, size, position, stored_bytes = [], 0, self.start, 0
        for raw, after in self._documents():
            if batch and (raw.is_long or size >= TASK_BYTES):
                yield Batch(batch, stored_bytes, position)
                batch, size = [], 0
            if raw.is_long:
                yield from self._parts(raw, after)
            else:
                batch.append(raw)
                size += len(raw.data)
            position, stored_bytes = after()
        yield Batch(batch, self._finished_bytes, Position(len(self.sources)))

    def _documents(self) -> Iterator[tuple[RawDocument, Callable[[], tuple[Position, int]]]]:
        """The documents after the start, each with a function that tells how far the input is read: the position, once it is behind
        the document, and the bytes as stored."""
        for number in range(self.start.source, len(self.sources)):
            source, count = self.sources[number], 0
            with open_source(source, self._encoder.json_keys) as reader:
                for count, raw in enumerate(reader, start=1):
                    if number == self.start.source and count <= self.start.documents:
                        self._skip(raw, count, reader)
                        continue
                    yield raw, functools.partial(self._how_far, number, count, reader)
                stored_bytes = reader.stored_bytes()
                self.finished.append({"path": source.path, "bytes": stored_bytes, "sha256": reader.sha256(), "documents": count})
                self._finished_bytes += stored_bytes
            if number == self.start.source and count < self.start.documents:
                raise _other_documents(source, self.start.documents)

    def _how_far(self, number: int, count: int, reader) -> tuple[Position, int]:
        return Position(number, count, reader.sha256()), self._finished_bytes + reader.stored_bytes()

    def _skip(self, raw: RawDocument, count: int, reader) -> None:
        """A document that an earlier run has done."""
        _read_to_end(raw)
        if count == self.start.documents and reader.sha256() != self.start.sha256:
            raise _other_documents(reader.source, count)

    def _parts(self, raw: RawDocument, after: Callable[[], tuple[Position, int]]) -> Iterator[Part]:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        held = None  # a part is sent when it is known whether another follows
        try:
            for piece in pieces(self._text(raw, digest), self._cuts, TASK_CHARS, self._encoder.max_stretch_chars):
                if held is not None:
                    yield Part(raw.name, held, False, after()[1])
                held = piece
        except DatasetError as error:
            if self._encoder.errors != "skip":
                raise _named(raw.name, error) from None
            _read_to_end(raw)
            position, stored_bytes = after()
            yield Part(raw.name, Piece("", held is None or held.first, 1, 0), True, stored_bytes, position, failed=True)
            return
        group = _group(raw, self._encoder) if self._encoder.groups else None
        position, stored_bytes = after()
        yield Part(raw.name, held, True, stored_bytes, position, digest.digest() if self._encoder.dedup else None, group)

    def _text(self, raw: RawDocument, digest) -> Iterator[str]:
        for chunk in text_chunks(raw, self._encoder.errors, self._encoder.json_keys):
            if self._encoder.dedup:
                digest.update(chunk.encode("utf-8"))
            yield chunk


load_tokenizer = functools.cache(build_tokenizer)  # one per process


def encode(encoder: Encoder, task: Batch | Part) -> Result:
    """Tokenize the documents of a task, in order. Raises DatasetError naming the document."""
    if isinstance(task, Part):
        document = Document(task.name, task.piece.first, task.is_last, skipped=task.failed, digest=task.digest, group=task.group)
        document.text_bytes = len(task.piece.text.encode("utf-8"))
        if not task.failed:
            _encode_text(encoder, document, task.piece)
        return Result(task.position, task.stored_bytes, [document])
    result = Result(task.position, task.stored_bytes)
    for raw in task.documents:
        document = Document(raw.name)
        result.documents.append(document)
        text = decode(raw, encoder.errors, encoder.json_keys)
        document.skipped = text is None
        if text:
            document.text_bytes = len(text.encode("utf-8"))
            document.digest = hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest() if encoder.dedup else None
            document.group = _group(raw, encoder) if encoder.groups else None
            _encode_text(encoder, document, Piece(text, True, 1, 0))
    return result


def _encode_text(encoder: Encoder, document: Document, whole: Piece) -> None:
    """Fills in ids, altered and skipped."""
    tokenizer = load_tokenizer(encoder.tokenizer_type, encoder.tokenizer_model)
    dtype, ids = best_dtype(tokenizer.vocab_size), []
    try:
        for piece in pieces([whole.text], tokenizer.cuts, limit=encoder.max_stretch_chars, begin=whole):
            encoded = tokenizer.encode_piece(piece.text, piece.first)
            ids += encoded
            if encoder.check_round_trip and not document.altered:
                document.altered = _is_altered(encoder, piece, tokenizer.decode_piece(encoded, piece.first))
    except DatasetError as error:
        if encoder.errors != "skip":
            raise _named(document.name, error) from None
        document.skipped = True
    document.ids = np.array(ids, dtype=dtype)


def _is_altered(encoder: Encoder, piece: Piece, back: str) -> bool:
    """Whether decoding gives another text. Raises DatasetError unless --errors replace."""
    if back == piece.text or encoder.errors == "replace":
        return back != piece.text
    at = next((i for i, (a, b) in enumerate(zip(piece.text, back)) if a != b), min(len(piece.text), len(back)))
    line, byte = piece.line + piece.text.count("\n", 0, at), piece.byte + len(piece.text[:at].encode("utf-8"))
    raise DatasetError(
        f"line {line}, byte {byte}: the tokenizer gives back {back[at : at + 20]!r} for {piece.text[at : at + 20]!r} "
        "(--check-round-trip); --errors replace keeps such documents, --errors skip leaves them out"
    )


def _group(raw: RawDocument, encoder: Encoder) -> str:
    """What pack_documents --group-by goes by: the file's path, or the fields of the line beside the text."""
    if not raw.is_json:
        return raw.name.replace("\n", " ")
    if raw.is_long:
        spans = string_spans(raw.data)
        fields = {key: json.loads(b'"%b"' % raw.data[value]) if isinstance(value, slice) else value
                  for key, value in spans.items() if key not in encoder.json_keys}  # fmt: skip
    else:
        fields = json_fields(raw.name, raw.data.decode("utf-8", errors="replace"))
    kept = {key: value for key, value in fields.items() if key not in encoder.json_keys and not isinstance(value, (dict, list))}
    return json.dumps(kept)


def _read_to_end(raw: RawDocument) -> None:
    for _ in raw.data if isinstance(raw.data, Iterator) else ():
        pass


def _named(name: str, error: DatasetError) -> DatasetError:
    """The error with the document's name in front, where it is not there yet."""
    return error if str(error).startswith(name) else DatasetError(f"{name}: {error}; --errors skip leaves it out")


def _other_documents(source: Source, count: int) -> DatasetError:
    return DatasetError(
        f"{source.path}: its first {count} documents are not those that were read before the interruption; put the input back as it "
        "was, or begin anew with --restart"
    )
