"""Cutting a long text into pieces that are tokenized on their own, without changing one id.

One document of 20 MB given to `tokenizers` whole takes 3 GB of memory and runs at a quarter of the speed of short pieces. A cut
is safe where no token can span it and where the tokenizer, seeing a piece's end instead of what follows, decides the same:

    cuts = byte_level_cuts(line_ends=True)
    [piece.text for piece in pieces(["ab cd\\n  ef\\n", "gh"], cuts, piece_chars=1)]    -> ["ab", " cd", "\\n", "  ef", "\\n", "gh"]

The text comes in chunks of any size, so a document of any length passes through in constant memory. Where no cut is safe, the
piece grows to the next place where one is, up to a limit; beyond it StretchTooLong says where that was.

    byte_level_cuts    byte-level BPE behind a pre-tokenizer of GPT-2, Llama 3, Qwen, GPT-4o or Mistral's Tekken
    pair_cuts          SentencePiece, or BPE over "\\u2581", that does not normalise: between two characters that no piece has so
    space_cuts         SentencePiece that normalises: at a single space that no piece spans, which the prefix "\\u2581" replaces
    anywhere           bytes

A `Cuts` is a function (text, start) -> (end, resume) or None: the first safe cut at or after `start` such that the text on both
sides is known: the piece ends before `end`, the next one begins at `resume` (after a space that is left out, else the same).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megacp.data.indexed_dataset import DatasetError

PIECE_CHARS = 1_000  # `tokenizers` is fastest on pieces that its tables and the CPU's caches hold together; the others do not care
STRETCH_CHARS = 2_000_000  # the longest way to a cut: `tokenizers` needs about 150 bytes of memory a character
SPACE = "\u2581"  # how SentencePiece writes a space

Cuts = Callable[[str, int], tuple[int, int] | None]


class StretchTooLong(DatasetError):
    """No safe cut for `limit` characters from `line` (from 1) and `byte` (from 0) of the document on."""

    def __init__(self, line: int, byte: int, limit: int):
        self.line, self.byte, self.limit = line, byte, limit
        super().__init__(
            f"line {line}, byte {byte}: no place in {limit:,} characters where the tokenizer surely ends a token; break the run up, "
            f"or raise --max-stretch-chars above {limit} (about 200 bytes of memory a character)"
        )


@dataclass(frozen=True)
class Piece:
    text: str
    first: bool  # begins the document
    line: int  # of its first character, from 1
    byte: int  # of its first character in the document's UTF-8, from 0


def pieces(
    chunks: Iterable[str], cuts: Cuts, piece_chars: int = PIECE_CHARS, limit: int = STRETCH_CHARS, begin: Piece | None = None
) -> Iterator[Piece]:
    """Parts of the text, at least one, of at least `piece_chars` characters (but the last) and at most `limit` more.

    `begin`: the text is that piece of a longer document, and the pieces count from it. Raises StretchTooLong.
    """
    first, line, byte = (begin.first, begin.line, begin.byte) if begin else (True, 1, 0)
    buffer, start, searched = "", 0, 0

    def until(end: int) -> tuple[int, int]:
        """Line and byte of a place in the buffer."""
        return line + buffer.count("\n", start, end), byte + _utf8_bytes(buffer[start:end])

    for chunk in chunks:
        buffer, start, searched = buffer[start:] + chunk, 0, max(searched - start, 0)
        while len(buffer) - start > piece_chars:
            stretch = start + piece_chars
            cut = cuts(buffer, max(stretch, searched))
            if (cut[0] if cut else len(buffer)) - stretch > limit:
                raise StretchTooLong(*until(stretch), limit)
            if cut is None:
                searched = len(buffer) - 1  # at its end a cut could not be judged, for what follows was not known
                break
            end, resume = cut
            yield Piece(buffer[start:end], first, line, byte)
            first, (line, byte) = False, until(resume)
            start = searched = resume
    yield Piece(buffer[start:], first, line, byte)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def anywhere(text: str, start: int) -> tuple[int, int] | None:
    """One token per byte: every border of characters is a cut."""
    return (start, start) if start < len(text) else None


def nowhere(text: str, start: int) -> None:
    """A tokenizer of which nothing is known: texts stay whole."""


# Characters assigned long ago, so that every library agrees that they are letters: Latin, Han, kana, Hangul.
_LETTER = "A-Za-z\u4e00-\u9fa5\u3041-\u3094\u30a1-\u30fa\uac00-\ud7a3"
# No letter, digit, combining mark or apostrophe, and nothing that composes with what stands before it under NFC. Not <, |, _ and >:
# letters before them would be cut in "<|im_start|>" and "<think>", which Qwen adds to its vocabulary.
_MARK = r"\n!\"#$%&()*+,\-./:;=?@\[\\\]^`{}~\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"
# In all these pre-tokenizers (a) nothing that is not white space is in one token with a space after it, and (b) a token that holds
# a letter goes on only with letters, marks or an apostrophe, one that holds a digit only with digits; and no token depends on what
# stands before it, nor, but for white space, on what follows.
_BYTE_LEVEL = rf"(?<=\S)(?= )|(?<=[{_LETTER}])(?=[0-9{_MARK}])|(?<=[0-9])(?=[{_LETTER}{_MARK}])"
# But for GPT-2 ("\n\n" before text is two tokens there, and one at a piece's end), a line feed ends its white space whatever follows;
# GPT-4o and Tekken take it into one token with "/".
_LINE_ENDS = r"|(?<=\n)(?=[^\s/])"


def byte_level_cuts(line_ends: bool) -> Cuts:
    """`line_ends`: also after a line feed that neither white space nor "/" follows."""
    search = re.compile(_BYTE_LEVEL + (_LINE_ENDS if line_ends else "")).search

    def cuts(text: str, start: int) -> tuple[int, int] | None:
        found = search(text, start)
        return (found.end(), found.end()) if found else None

    return cuts


def pairs_inside(vocabulary: Iterable[str]) -> set[str]:
    """Every two neighbouring characters of the pieces of a vocabulary."""
    return {piece[i : i + 2] for piece in vocabulary for i in range(len(piece) - 1)}


def pair_cuts(vocabulary: Iterable[str], known: frozenset[str] | None) -> Cuts:
    """Between characters that are neighbours in no piece, so that no merge and no longer match spans them.

    `known`: characters with a piece of their own (None: unknown ones become bytes). A cut needs one of them before it, for several
    unknown characters in a row are one token.
    """
    spellings = {SPACE: (SPACE, " ")}
    pairs = {
        a + b for left, right in pairs_inside(vocabulary) for a in spellings.get(left, left) for b in spellings.get(right, right)
    }
    before = None if known is None else known | {" "} if SPACE in known else known

    def cuts(text: str, start: int) -> tuple[int, int] | None:
        for end in range(max(start, 1), len(text)):
            if text[end - 1 : end + 1] not in pairs and (before is None or text[end - 1] in before):
                return end, end
        return None

    return cuts


def space_cuts(vocabulary: Iterable[str]) -> Cuts:
    """At one space between two characters that stay what they are, more or less: ASCII, or letters and digits of any script.

    Where pieces hold text before a space, as split_by_whitespace=false learns them, only after ASCII that none of them has there.
    """
    before_space = {left for left, right in pairs_inside(vocabulary) if right == SPACE and left != SPACE}
    kept = "".join(c for c in map(chr, range(33, 127)) if not {c.lower(), c.upper()} & before_space)
    if before_space and not kept:
        return nowhere
    left = r"[!-~\w]" if not before_space else f"[{re.escape(kept)}]"
    search = re.compile(rf"(?<={left}) (?=[!-~\w])").search

    def cuts(text: str, start: int) -> tuple[int, int] | None:
        found = search(text, start)
        return found.span() if found else None

    return cuts
