"""The strings of a JSON object of hundreds of megabytes, without a copy of the whole: `json` would need up to eight times its size.

    line = b'{"text": "two\\\\nlines", "n": 1}'
    spans = string_spans(line)                                          {"text": slice(10, 20), "n": 1}
    [json.loads(c) for c in string_chunks(line, spans["text"])]         ["two\\nlines"]

What is no string is parsed, so a line that is not JSON is refused as `json` would.
"""

import json
import re
from collections.abc import Iterator

_QUOTE_OR_ESCAPE = re.compile(rb'["\\]')
_STRUCTURE = re.compile(rb'["{}\[\],]')
_BLANK = re.compile(rb"[ \t\r\n]*")
# Whole characters and whole escapes, surrogate pairs ("\ud83d\ude00") undivided.
_PART = re.compile(
    rb'(?:[^\\"]{1,32}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]){1,32768}(?![\x80-\xbf])'
)


def string_spans(line: bytes) -> dict:
    """{key: slice of its string without the quotes, or its value}. Raises ValueError where this is no JSON object."""
    spans, at = {}, _after(line, 0, b"{")
    if line[at : at + 1] == b"}":
        return _ended(line, at + 1, spans)
    while True:
        _expect(line, at, b'"')
        end = _string_end(line, at)
        key = json.loads(line[at:end])
        at = _after(line, end, b":")
        if line[at : at + 1] == b'"':
            end = _string_end(line, at)
            spans[key] = slice(at + 1, end - 1)
        else:
            end = _value_end(line, at)
            spans[key] = json.loads(line[at:end])
        at = _BLANK.match(line, end).end()
        if line[at : at + 1] == b"}":
            return _ended(line, at + 1, spans)
        at = _after(line, at, b",")


def string_chunks(line: bytes, span: slice) -> Iterator[bytes]:
    """The string's JSON literal as several literals of at most about 1 MB. Raises ValueError at an escape that JSON does not know."""
    begin = span.start
    while begin < span.stop:
        part = _PART.match(line, begin, span.stop)
        if part is None:
            raise ValueError(f"no escape of JSON at byte {begin}: {line[begin : begin + 6]!r}")
        yield b'"' + part.group() + b'"'
        begin = part.end()


def _after(line: bytes, at: int, sign: bytes) -> int:
    """Where the next thing begins after `sign`, which must come next."""
    at = _BLANK.match(line, at).end()
    _expect(line, at, sign)
    return _BLANK.match(line, at + 1).end()


def _expect(line: bytes, at: int, sign: bytes) -> None:
    if line[at : at + 1] != sign:
        raise ValueError(f"expected {sign.decode()} at byte {at}, found {line[at : at + 10]!r}")


def _ended(line: bytes, at: int, spans: dict) -> dict:
    if line[at:].strip(b" \t\r\n"):
        raise ValueError(f"more after the object, at byte {at}")
    return spans


def _string_end(line: bytes, at: int) -> int:
    """After the closing quote of the string that opens at `at`."""
    at += 1
    while found := _QUOTE_OR_ESCAPE.search(line, at):
        if found.group() == b'"':
            return found.end()
        at = found.end() + 1
    raise ValueError("a string without an end")


def _value_end(line: bytes, at: int) -> int:
    """After a value that is no string."""
    depth = 0
    while found := _STRUCTURE.search(line, at):
        sign, at = found.group(), found.start()
        if sign == b'"':
            at = _string_end(line, at)
            continue
        if sign in (b"}", b",") and depth == 0:
            return at
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1, b",": 0}[sign]
        at += 1
    raise ValueError("an object without an end")
