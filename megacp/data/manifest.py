"""PREFIX.manifest.json beside PREFIX.bin and .idx: what a dataset was made of, with which tokenizer and options, and its hashes.

    {"format": 1,
     "tokenizer": {"type": "HuggingFace", "model": "tokenizer.json", "sha256": "6d0e...", "vocab_size": 128256, "bos": 128000, ...},
     "options": {"append_eod": true, ...},
     "inputs": [{"path": "src/a.py", "bytes": 1200, "sha256": "91ab...", "documents": 1}, ...],
     "counts": {"documents": 1, "tokens": 301, "text_bytes": 1200, "empty": 0, "skipped": 0, "duplicate": 0, ...}, "skipped_names": [],
     "output": {"dtype": "int32", "documents": 1, "tokens": 301, "sha256": {"bin": "...", "idx": "..."}}}

The hash of an input is that of its content, decompressed, so of a plain file what sha256sum says. Nothing in it depends on when, on
which machine and by how many workers the dataset was made.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megacp.data.indexed_dataset import DatasetError
from megacp.data.tokenizer import Tokenizer

MANIFEST = ".manifest.json"
FORMAT = 1


@dataclass
class Manifest:
    tokenizer: dict
    options: dict
    inputs: list[dict]
    counts: dict[str, int]
    skipped_names: list[str]  # the first of them
    output: dict = field(default_factory=dict)
    format: int = FORMAT

    def to_dict(self) -> dict:
        return {"format": self.format, **{key: value for key, value in asdict(self).items() if key != "format"}}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, fields: dict) -> "Manifest":
        return cls(**fields)


def describe_tokenizer(tokenizer: Tokenizer, model: str | None) -> dict:
    """The manifest's part about the tokenizer."""
    named = {name: getattr(tokenizer, name) for name in ("vocab_size", "bos", "eod", "pad")}
    return {"type": tokenizer.type, "model": model, "sha256": tokenizer.fingerprint, **named}


def read_manifest(prefix: str) -> Manifest | None:
    """None where there is none, as beside datasets that Megatron made. Raises DatasetError."""
    path = Path(f"{prefix}{MANIFEST}")
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise DatasetError(f"{path}: format {fields['format']}, expected {FORMAT}; preprocess again")
        return Manifest.from_dict(fields)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{path}: not a manifest of preprocess_data ({error!r})") from None


def check_tokenizer(flag: str, prefixes: list[str], tokenizer: Tokenizer, model: str | None) -> None:
    """Raises DatasetError naming `flag` when, by its manifest, another tokenizer made a dataset: its ids would mean other text."""
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.tokenizer["sha256"] != tokenizer.fingerprint:
            made = manifest.tokenizer
            raise DatasetError(
                f"{flag} {prefix} was made with {made['type']} {made['model'] or ''} (sha256 {made['sha256'][:12]}), but "
                f"--tokenizer-model {model or tokenizer.type} is another tokenizer (sha256 {tokenizer.fingerprint[:12]}); give the one "
                "it was made with, or preprocess the data again"
            )
