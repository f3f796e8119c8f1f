"""Puts encoded documents into a dataset, leaves out those that are not wanted, and counts both.

writer = DocumentWriter(partial, eod=2, limits=Limits(min_tokens=10, max_tokens=None))
writer.add(result)              the documents of one task, in the order of the input
writer.counts                   {"documents": 7, "tokens": 812, "too_short": 2, "too_short_tokens": 11, ...}
"""

from collections import Counter
from dataclasses import dataclass

from megacp.data.document_tasks import Document, Result
from megacp.data.partial_dataset import PartialDataset

# Why a document is left out; of each the documents, and the tokens as <reason>_tokens, are counted.
REASONS = ("empty", "skipped", "too_short", "too_long", "duplicate")
_NAMES_KEPT = 5  # of documents that were skipped, for a message


@dataclass(frozen=True)
class Limits:
    """Tokens of a document, without bos and eod."""

    min_tokens: int = 0
    max_tokens: int | None = None


class DocumentWriter:
    """`bos`, `eod`: the tokens put around each document, None for none."""

    def __init__(self, partial: PartialDataset, bos: int | None, eod: int | None, limits: Limits, groups: bool = False):
        self.counts = Counter(dict.fromkeys(["documents", "tokens", "text_bytes", "read_bytes", "altered"], 0))
        self.counts.update({key: 0 for reason in REASONS for key in (reason, f"{reason}_tokens")})
        self.skipped_names: list[str] = []
        self._partial, self._bos, self._eod, self._limits, self._groups = partial, bos, eod, limits, groups
        self._open = Counter()  # of the document whose end has not come: text_bytes, skipped, altered

    @property
    def read_bytes(self) -> int:
        """Bytes of text that were tokenized, also for documents that were left out, or are not complete."""
        return self.counts["read_bytes"] + self._open["text_bytes"]

    def add(self, result: Result) -> None:
        for document in result.documents:
            self._open.update(text_bytes=document.text_bytes, skipped=document.skipped, altered=document.altered)
            if document.ends:
                self._end(document)
            elif document.ids is not None and not self._open["skipped"]:
                self._append(document.ids)

    def _append(self, ids) -> None:
        if self._partial.open_tokens == 0 and self._bos is not None:
            self._partial.append([self._bos])
        self._partial.append(ids)

    def _end(self, document: Document) -> None:
        before = self._partial.open_tokens
        tokens = (0 if document.ids is None else len(document.ids)) + before - (before > 0 and self._bos is not None)
        reason = self._reason_against(document, tokens)
        if reason:
            if before:
                self._partial.drop_document()
            self.counts.update({reason: 1, f"{reason}_tokens": tokens})
            if reason == "skipped":
                self.skipped_names = [*self.skipped_names, document.name][:_NAMES_KEPT]
        else:
            self._append(document.ids)
            if self._eod is not None:
                self._partial.append([self._eod])
            self.counts.update(
                documents=1,
                tokens=self._partial.open_tokens,
                text_bytes=self._open["text_bytes"],
                altered=bool(self._open["altered"]),
            )
            self._partial.end_document()
            if self._groups:
                self._partial.add_group(document.group)
        self.counts["read_bytes"] += self._open["text_bytes"]
        self._open.clear()

    def _reason_against(self, document: Document, tokens: int) -> str | None:
        if self._open["skipped"]:
            return "skipped"
        if tokens == 0:
            return "empty"
        if tokens < self._limits.min_tokens:
            return "too_short"
        if self._limits.max_tokens is not None and tokens > self._limits.max_tokens:
            return "too_long"
        if document.digest is not None and not self._partial.add_digest(document.digest):
            return "duplicate"
        return None
