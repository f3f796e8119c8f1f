"""Reads the documents of one input, hashes what it reads and knows how far it is.

with open_source(Source("pages.jsonl.gz", "jsonl", ".gz")) as reader:
    for raw in reader: ...
    reader.sha256()          of the content so far, decompressed; at the end of a plain file, of the file
    reader.stored_bytes()    how much of the file on disk is behind, for a progress bar
"""

import codecs
import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence

from megacp.data.indexed_dataset import DatasetError
from megacp.data.raw_documents import CHUNK_BYTES, STDIN, RawDocument, Source

_PARQUET_ROWS = 64  # rows decoded at a time: few, for one may hold a whole book


def open_source(source: Source, columns: Sequence[str] = ("text",)) -> "TextReader | LinesReader | ParquetReader":
    """A reader for a source; `columns`: of a parquet table, joined by line feeds."""
    if source.kind == "parquet":
        return ParquetReader(source, columns)
    return LinesReader(source) if source.kind == "jsonl" else TextReader(source)


class _StreamReader:
    """Of what is read from beginning to end."""

    def __init__(self, source: Source):
        self.source = source
        self.name = "standard input" if source.path == STDIN else source.path
        self._raw = sys.stdin.buffer if source.path == STDIN else open(source.path, "rb")
        self._stream = _decompressed(self.name, self._raw, source.compression)
        self._hash = hashlib.sha256()
        self._read_bytes = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        if self.source.path != STDIN:
            self._raw.close()

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def stored_bytes(self) -> int:
        return self._raw.tell() if self._raw.seekable() else self._read_bytes

    def _read(self, read, size: int) -> bytes:
        """read(size), hashed."""
        try:
            data = read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            place = f" after line {self._number}" if isinstance(self, LinesReader) else ""
            kind = {".gz": "gzip", ".zst": "zstd"}[self.source.compression]
            raise DatasetError(f"{self.name}: the {kind} data is damaged or truncated{place} ({error})") from error
        self._hash.update(data)
        self._read_bytes += len(data)
        return data


class TextReader(_StreamReader):
    """One document: in one piece when it is short, else in chunks."""

    def __iter__(self) -> Iterator[RawDocument]:
        data = b""
        while len(data) <= 4 * CHUNK_BYTES and (chunk := self._read(self._stream.read, CHUNK_BYTES)):
            data += chunk
        if len(data) <= 4 * CHUNK_BYTES:
            yield RawDocument(self.name, data, is_json=False)
            return
        rest = iter(lambda: self._read(self._stream.read, CHUNK_BYTES), b"")
        yield RawDocument(self.name, _chain(data, rest), is_json=False)
        for _ in rest:  # what was not asked for is hashed all the same
            pass


class LinesReader(_StreamReader):
    """A document a line."""

    _number = 0

    def __iter__(self) -> Iterator[RawDocument]:
        while line := self._read(self._stream.readline, -1):
            self._number += 1
            if self._number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # as Windows writes it
            yield RawDocument(f"{self.name}:{self._number}", line, is_json=True)


class ParquetReader:
    """A document a row: the text of `columns`, joined by line feeds."""

    def __init__(self, source: Source, columns: Sequence[str]):
        try:
            import pyarrow.parquet
        except ImportError:
            raise DatasetError(f"{source.path}: .parquet needs pyarrow, which is not installed; pip install pyarrow") from None
        self.source, self._columns = source, list(columns)
        try:
            self._file = pyarrow.parquet.ParquetFile(source.path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{source.path}: not a whole parquet file ({error})") from error
        for column in columns:
            field = self._file.schema_arrow.field(column) if column in self._file.schema_arrow.names else None
            if field is None or not (pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type)):
                kind = "there is none" if field is None else f"it is {field.type}"
                raise DatasetError(
                    f"{source.path}: expected a column of text {column!r} (--json-keys), {kind}; the columns are "
                    f"{', '.join(self._file.schema_arrow.names)}"
                )
        with open(source.path, "rb") as file:
            self._sha256 = hashlib.sha256()
            while block := file.read(CHUNK_BYTES):
                self._sha256.update(block)
        self._rows = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def sha256(self) -> str:
        """Of the file, from the start: a table is not read from beginning to end."""
        return self._sha256.hexdigest()

    def stored_bytes(self) -> int:
        return os.path.getsize(self.source.path) * self._rows // max(self._file.metadata.num_rows, 1)

    def __iter__(self) -> Iterator[RawDocument]:
        import pyarrow

        try:
            for batch in self._file.iter_batches(_PARQUET_ROWS, columns=self._columns):
                for row in range(len(batch)):
                    self._rows += 1
                    values = [
                        batch.column(self._columns.index(name) if len(batch.columns) > 1 else 0)[row] for name in self._columns
                    ]
                    yield self._document([value.as_buffer() for value in values])
        except pyarrow.ArrowException as error:
            raise DatasetError(f"{self.source.path}: damaged after row {self._rows} ({error})") from error

    def _document(self, buffers: list) -> RawDocument:
        name = f"{self.source.path}:{self._rows}"
        views = [memoryview(buffer) if buffer is not None else memoryview(b"") for buffer in buffers]  # a null is an empty text
        if sum(map(len, views)) <= 4 * CHUNK_BYTES:
            return RawDocument(name, b"\n".join(views), is_json=False)
        return RawDocument(name, views[0] if len(views) == 1 else b"\n".join(views), is_json=False)


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _decompressed(name: str, raw, compression: str):
    """A buffered stream of what is in the file. Raises DatasetError for one of no bytes: even nothing, compressed, has a header."""
    if compression and not raw.peek(1):
        raw.close()
        raise DatasetError(f"{name}: the file is empty, so it is not a whole {compression} file; fetch it again, or remove it")
    if compression == ".gz":
        return gzip.open(raw, "rb")
    if compression == ".zst":
        return io.BufferedReader(_Zstd(name, raw), CHUNK_BYTES)
    return raw


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame. The library's own stream ends without a word where the file was cut off."""

    def __init__(self, name: str, raw):
        try:
            import zstandard
        except ImportError:
            raise DatasetError(f"{name}: .zst needs zstandard, which is not installed; pip install zstandard") from None
        self._library, self._raw, self._frame = zstandard, raw, None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(CHUNK_BYTES // 8)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            try:
                self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
                self._output = self._frame.decompress(self._input)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count
