"""Documents as people keep them, in files, folders and JSON lines, one after the other in an order that never changes.

    sources = find_sources(["notes.txt", "code/", "pages.jsonl.gz"], extensions=[".py"])
    for raw in read_documents(sources):        raw.name: "notes.txt", "code/a.py", "pages.jsonl.gz:1", "pages.jsonl.gz:2", ...
        text = decode(raw, errors="strict", json_keys=["text"])

A file is one document; in .jsonl and .jsonl.gz each line is one, {"text": "..."}. Folders are read recursively, sorted by path,
names that begin with a dot left out. Reading keeps bytes, so that decoding can happen in another process.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacp.data.indexed_dataset import DatasetError

ERRORS = ("strict", "replace", "skip")  # what to do with a document that is not UTF-8
_JSON_LINES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class RawDocument:
    name: str  # the file, or file:line, for messages
    data: bytes  # the file's content, or one line of JSON
    is_json: bool


def find_sources(inputs: list[str], extensions: list[str] | None = None) -> list[Path]:
    """The files to read, in order. `extensions` (None: all) picks the files of folders; a file named itself is always read.

    Raises DatasetError naming --input.
    """
    sources = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = _files_below(path)
            chosen = [file for file in found if extensions is None or file.name.endswith(tuple(extensions))]
            if not chosen:
                wanted = f" that ends in {', '.join(extensions)} (--extensions)" if extensions else ""
                raise DatasetError(f"--input {name}: none of the {len(found)} files in this folder{wanted} can be read")
            sources += chosen
        elif path.is_file():
            sources.append(path)
        else:
            raise DatasetError(f"--input {name} does not exist; it takes text files, .jsonl, .jsonl.gz or folders of them")
    return sources


def read_documents(sources: list[Path]) -> Iterator[RawDocument]:
    """The documents of the files, in order. Raises DatasetError naming a .gz file that is damaged."""
    for path in sources:
        if path.name.endswith(_JSON_LINES):
            yield from _read_lines(path)
        else:
            yield RawDocument(str(path), path.read_bytes(), is_json=False)


def decode(raw: RawDocument, errors: str = "strict", json_keys: Sequence[str] = ("text",)) -> str | None:
    """The text of a document: of a JSON line, the values of `json_keys` joined by a line feed.

    None when errors is "skip" and the document cannot be used. "replace" puts U+FFFD for what is not UTF-8. Raises DatasetError
    naming the file and the byte or the line.
    """
    try:
        text = _to_text(raw, raw.data, errors)
        if not raw.is_json:
            return text
        return _json_text(raw, text, errors, json_keys) if text.strip() else ""  # an empty line is an empty document
    except DatasetError:
        if errors == "skip":
            return None
        raise


def _to_text(raw: RawDocument, data: bytes, errors: str) -> str:
    try:
        return data.decode("utf-8", errors="replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{raw.name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; save it as UTF-8, or take "
            "--errors replace or --errors skip"
        ) from None


def _json_text(raw: RawDocument, line: str, errors: str, json_keys: Sequence[str]) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{raw.name}: not a line of JSON ({error}); mend it, or take --errors skip") from None
    if not isinstance(fields, dict):
        raise DatasetError(f'{raw.name}: expected an object such as {{"text": "..."}}, found {type(fields).__name__}')
    for key in json_keys:
        if not isinstance(fields.get(key), str):
            found = (
                f"it is {json.dumps(fields[key])[:40]}" if key in fields else f"the line has {', '.join(sorted(fields)) or 'none'}"
            )
            raise DatasetError(
                f"{raw.name}: expected text under the key {key!r} (--json-keys), {found}; --errors skip leaves it out"
            )
    text = "\n".join(fields[key] for key in json_keys)
    # JSON can spell half of a surrogate pair, "\ud83d", which no UTF-8 can hold.
    return _to_text(raw, text.encode("utf-8", errors="surrogatepass"), errors)


def _read_lines(path: Path) -> Iterator[RawDocument]:
    number = 0
    opened = gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")
    try:
        with opened as lines:
            for number, line in enumerate(lines, start=1):
                yield RawDocument(f"{path}:{number}", line, is_json=True)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DatasetError(f"{path}: the gzip data is damaged or truncated after line {number} ({error})") from error


def _files_below(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
