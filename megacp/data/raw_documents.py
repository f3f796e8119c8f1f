"""Documents as people keep them, in files, folders and tables, one after the other in an order that never changes.

    sources = find_sources(["notes.txt", "code/", "pages.jsonl.gz"], extensions=[".py"])
    for raw in read_documents(sources):        raw.name: "notes.txt", "code/a.py", "pages.jsonl.gz:1", "pages.jsonl.gz:2", ...
        text = decode(raw, errors="strict", json_keys=["text"])

A file is one document; in .jsonl each line is one, {"text": "..."}, in .parquet each row. Text and .jsonl may be compressed (.gz,
.zst), and "-" is what comes on standard input. Folders are read recursively, sorted by path, names that begin with a dot left out.
Reading keeps bytes, so that decoding can happen in another process.
"""

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacp.data.indexed_dataset import DatasetError
from megacp.data.long_json_lines import string_chunks, string_spans

ERRORS = ("strict", "replace", "skip")  # what to do with a document that is not UTF-8
STDIN = "-"
CHUNK_BYTES = 1 << 20
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Source:
    """One input. `kind`: "text" (one document), "jsonl" or "parquet"; `compression`: "", ".gz" or ".zst"."""

    path: str
    kind: str
    compression: str = ""


@dataclass(frozen=True)
class RawDocument:
    """`data`: the file's content, one line of JSON, or the file in chunks when it is long (then to be read before the next)."""

    name: str  # the file, or file:line, for messages
    data: bytes | memoryview | Iterator[bytes]
    is_json: bool

    @property
    def is_long(self) -> bool:
        """Too long to be sent to a worker in one piece."""
        return not isinstance(self.data, bytes) or len(self.data) > 4 * CHUNK_BYTES


def find_sources(inputs: list[str], extensions: list[str] | None = None, stdin_kind: str = "jsonl") -> list[Source]:
    """What to read, in order. `extensions` (None: all) picks the files of folders; a file named itself is always read.

    Raises DatasetError naming --input.
    """
    sources = []
    for name in inputs:
        path = Path(name)
        if name == STDIN:
            sources.append(Source(STDIN, stdin_kind))
        elif path.is_dir():
            found = _files_below(path)
            chosen = [file for file in found if extensions is None or file.name.endswith(tuple(extensions))]
            if not chosen:
                if not found:
                    raise DatasetError(f"--input {name}: there is no file in this folder; names that begin with a dot are left out")
                raise DatasetError(
                    f"--input {name}: none of the {len(found)} files in this folder ends in {', '.join(extensions)} (--extensions)"
                )
            sources += [_source(file) for file in chosen]
        elif path.exists():
            sources.append(_source(path))
        else:
            raise DatasetError(
                f"--input {name} does not exist; it takes text, .jsonl and .parquet files, the first two also as .gz or .zst, folders "
                "of them, and - for standard input"
            )
    if [source.path for source in sources].count(STDIN) > 1:
        raise DatasetError("--input -: standard input can be read only once")
    return sources


def _source(path: Path) -> Source:
    compression = path.suffix if path.suffix in _COMPRESSIONS else ""
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(path.name.removesuffix(compression)).suffix, "text")
    return Source(str(path), kind, compression)


def read_documents(sources: list[Source], columns: Sequence[str] = ("text",)) -> Iterator[RawDocument]:
    """The documents of the sources, in order; `columns`: of a parquet table. Raises DatasetError naming a damaged file."""
    from megacp.data.source_readers import open_source  # which builds on this module

    for source in sources:
        with open_source(source, columns) as reader:
            yield from reader


def decode(raw: RawDocument, errors: str = "strict", json_keys: Sequence[str] = ("text",)) -> str | None:
    """The text of a document: of a JSON line, the values of `json_keys` joined by a line feed.

    None when errors is "skip" and the document cannot be used. "replace" puts U+FFFD for what is not UTF-8. Raises DatasetError
    naming the file and the byte or the line.
    """
    try:
        if raw.is_long:
            return "".join(text_chunks(raw, errors, json_keys))
        text = _to_text(raw.name, raw.data, errors)
        if not raw.is_json:
            return text
        return _json_text(raw, text, errors, json_keys) if text.strip() else ""  # an empty line is an empty document
    except DatasetError:
        if errors == "skip":
            return None
        raise


def text_chunks(raw: RawDocument, errors: str, json_keys: Sequence[str]) -> Iterator[str]:
    """The text of a long document in parts. Raises DatasetError as `decode`, also when errors is "skip"."""
    if not raw.is_json:
        yield from _decoded(raw, errors)
        return
    try:
        spans = string_spans(raw.data)
    except ValueError as error:
        raise DatasetError(f"{raw.name}: not a line of JSON ({error}); mend it, or take --errors skip") from None
    for number, key in enumerate(json_keys):
        if not isinstance(spans.get(key), slice):
            raise _missing_text(raw.name, key, spans)
        if number:
            yield "\n"
        yield from _json_chunks(raw, spans[key], errors)


def _decoded(raw: RawDocument, errors: str) -> Iterator[str]:
    """Chunks of bytes as text; a character may lie on two chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace" if errors == "replace" else "strict")
    chunks = raw.data
    if isinstance(chunks, (bytes, memoryview)):
        whole = memoryview(chunks)
        chunks = (whole[begin : begin + CHUNK_BYTES] for begin in range(0, len(whole), CHUNK_BYTES))
    begin = 0  # bytes before this chunk
    try:
        for chunk in chunks:
            pending = len(decoder.getstate()[0])
            yield decoder.decode(chunk)
            begin += len(chunk)
        pending = len(decoder.getstate()[0])
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(raw.name, error.object[error.start], begin - pending + error.start) from None


def _to_text(name: str, data: bytes, errors: str) -> str:
    try:
        return data.decode("utf-8", errors="replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, data[error.start], error.start) from None


def _not_utf8(name: str, byte: int, offset: int) -> DatasetError:
    return DatasetError(
        f"{name}: byte 0x{byte:02x} at offset {offset} is not UTF-8; save it as UTF-8, or take --errors replace or --errors skip"
    )


def _json_chunks(raw: RawDocument, span: slice, errors: str) -> Iterator[str]:
    begin = span.start - 1  # of the literal, whose quotes are not in the line
    try:
        for literal in string_chunks(raw.data, span):
            text = _to_text(raw.name, literal, errors)
            yield _without_halves(raw.name, json.loads(text), errors)
            begin += len(literal) - 2
    except DatasetError:
        raise
    except json.JSONDecodeError as error:
        place = begin + len(text[: error.pos].encode("utf-8"))
        raise DatasetError(
            f"{raw.name}: not a line of JSON ({error.msg} at byte {place}); mend it, or take --errors skip"
        ) from None
    except ValueError as error:
        raise DatasetError(f"{raw.name}: not a line of JSON ({error}); mend it, or take --errors skip") from None


def _json_text(raw: RawDocument, line: str, errors: str, json_keys: Sequence[str]) -> str:
    fields = json_fields(raw.name, line)
    for key in json_keys:
        if not isinstance(fields.get(key), str):
            raise _missing_text(raw.name, key, fields)
    return _without_halves(raw.name, "\n".join(fields[key] for key in json_keys), errors)


def json_fields(name: str, line: str | bytes) -> dict:
    """The object that a line holds. Raises DatasetError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{name}: not a line of JSON ({error}); mend it, or take --errors skip") from None
    if not isinstance(fields, dict):
        found = type(fields).__name__
        raise DatasetError(f'{name}: expected an object such as {{"text": "..."}}, found {found}; --errors skip leaves it out')
    return fields


def _missing_text(name: str, key: str, fields: dict) -> DatasetError:
    found = f"it is {json.dumps(fields[key])[:40]}" if key in fields else f"the line has {', '.join(sorted(fields)) or 'none'}"
    return DatasetError(f"{name}: expected text under the key {key!r} (--json-keys), {found}; --errors skip leaves it out")


def _without_halves(name: str, text: str, errors: str) -> str:
    """JSON can spell half of a surrogate pair, "\\ud83d", which no UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors != "replace":
            raise DatasetError(
                f"{name}: \\u{ord(text[error.start]):04x} is half of a surrogate pair, which is no text; mend the line, or take "
                "--errors replace or --errors skip"
            ) from None
        return text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
    return text


def _files_below(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
