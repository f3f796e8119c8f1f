"""A tokenizer.json, read by the `tokenizers` library. bos, eod and pad are looked up by name, then in tokenizer_config.json beside it.

Two kinds are cut (see `safe_cuts`): byte-level BPE behind a known pre-tokenizer (Llama 3, Qwen, GPT-2), and BPE over "▁", which is
how a SentencePiece model looks as a tokenizer.json (Llama 2, Mistral, Gemma). Others get each text whole.
"""

import json
import os
import re
from pathlib import Path

from tokenizers import Tokenizer as TokenizerJson

from megacp.data import split_patterns
from megacp.data.indexed_dataset import DatasetError
from megacp.data.safe_cuts import SPACE, Cuts, byte_level_cuts, nowhere, pair_cuts
from megacp.data.tokenizer import Tokenizer, file_fingerprint

# Tokens that end a document in pre-training, by the names of Llama 3, Qwen and GPT, Llama 2, Gemma. An instruct model's
# tokenizer_config.json names the end of a turn instead (<|eot_id|>, <|im_end|>), so it is asked last.
_END_OF_DOCUMENT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_BEGIN_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>")
_PAD = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>")
# Characters that NFC leaves alone whatever stands beside them, in every version of Unicode: no marks, no jamo.
_COMPOSED = re.compile(
    r"[\x00-\u02ff\u0400-\u0482\u048a-\u052f\u2010-\u2027\u3001-\u3029\u3041-\u3096\u30a1-\u30fe\u4e00-\u9fff\uac00-\ud7a3\uff01-\uff5e]*"
).fullmatch
_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


class HuggingFaceTokenizer(Tokenizer):
    type = "HuggingFace"

    def __init__(self, path: Path):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library starts a thread a CPU in every worker otherwise
        try:
            self._model = TokenizerJson.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DatasetError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from error
        self._model.no_truncation()  # some files come with a length, and would cut documents
        self._model.no_padding()
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        configured = _special_tokens(path.with_name("tokenizer_config.json"))

        special = {token.content for token in self._model.get_added_tokens_decoder().values()}  # "<s>" is plain text for Qwen

        def first_of(names: tuple[str, ...], key: str) -> int | None:
            found = [name for name in names if name in special] + [configured.get(key)]
            return vocabulary.get(found[0])

        self.bos, self.pad = first_of(_BEGIN_OF_TEXT, "bos_token"), first_of(_PAD, "pad_token")
        self.eod = first_of(_END_OF_DOCUMENT, "eos_token")
        if self.eod is None:
            raise DatasetError(
                f"--tokenizer-model {path}: no token ends a document; looked for {', '.join(_END_OF_DOCUMENT)} and for eos_token "
                "in tokenizer_config.json beside it"
            )
        self.fingerprint = file_fingerprint(path)
        fields = json.loads(self._model.to_str())
        self.cuts, rest = _byte_level(fields) or _over_spaces(fields) or (nowhere, fields)
        self._rest = self._model if rest is fields else TokenizerJson.from_str(json.dumps(rest))
        # Normalising costs a quarter of the time of the rest, and most text is composed (NFC) as it is.
        composed = fields["normalizer"] == {"type": "NFC"}
        self._unnormalized = TokenizerJson.from_str(json.dumps({**fields, "normalizer": None})) if composed else None
        for model in filter(None, (self._model, self._rest, self._unnormalized)):
            model.encode_special_tokens = True  # the text of a special token is text

    def encode_piece(self, text: str, first: bool) -> list[int]:
        model = self._model if first else self._rest
        if self._unnormalized and _COMPOSED(text):
            model = self._unnormalized
        return model.encode_batch_fast([text], add_special_tokens=False)[0].ids  # fast: without the place of each token

    def decode_piece(self, ids: list[int], first: bool) -> str:
        return (self._model if first else self._rest).decode(ids, skip_special_tokens=False)


def _special_tokens(config: Path) -> dict[str, str]:
    """{"bos_token": text, ...} as far as the config names them; a token is a string or {"content": string}."""
    if not config.is_file():
        return {}
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{config}: not JSON ({error})") from error
    named = {key: fields.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    named = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items()}
    return {key: token for key, token in named.items() if token is not None}


def _steps(step: dict | None, key: str) -> list[dict]:
    """The steps of a normalizer or pre-tokenizer, of which several are a Sequence."""
    if step is None:
        return []
    return [inner for outer in step[key] for inner in _steps(outer, key)] if step["type"] == "Sequence" else [step]


def _byte_level(fields: dict) -> tuple[Cuts, dict] | None:
    """Cuts of byte-level BPE behind a known pre-tokenizer; the rest of a text is encoded as its beginning."""
    if any(step["type"] != "NFC" for step in _steps(fields["normalizer"], "normalizers")) or fields["model"]["type"] != "BPE":
        return None
    *splits, last = _steps(fields["pre_tokenizer"], "pretokenizers") or [{"type": None}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits and last["use_regex"]:
        pattern = split_patterns.GPT2
    elif len(splits) == 1 and splits[0]["type"] == "Split" and not last["use_regex"]:
        pattern = splits[0]["pattern"].get("Regex")
        if (splits[0]["behavior"], splits[0]["invert"]) not in (("Isolated", False), ("Removed", True)):
            return None
    else:
        return None
    if pattern not in (split_patterns.GPT2, *split_patterns.LINE_ENDS):
        return None
    cuts = byte_level_cuts(line_ends=pattern in split_patterns.LINE_ENDS)
    # Added tokens are found first. A cut must not fall into one, nor take away the blanks or the neighbour that it looks at.
    added = [token for token in fields["added_tokens"] if not token["special"]]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] or cuts(token["content"], 1) for token in added):
        return None
    return cuts, fields


def _over_spaces(fields: dict) -> tuple[Cuts, dict] | None:
    """Cuts of BPE that sees a space as "▁" and the text as one word, and the tokenizer for the rest of a text: no "▁" in front."""
    model = fields["model"]
    plain = model["type"] == "BPE" and model["byte_fallback"] and not (model.get("ignore_merges") or model["dropout"])
    whole = not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")) if plain else False
    if not whole or any(not token["special"] for token in fields["added_tokens"]):
        return None
    normalizers = _steps(fields["normalizer"], "normalizers")
    splits = _steps(fields["pre_tokenizer"], "pretokenizers")
    if normalizers[:1] == [{"type": "Prepend", "prepend": SPACE}]:
        normalizers = normalizers[1:]
    if normalizers == [_REPLACE_SPACE] and all(_splits_at_spaces(split) for split in splits):
        rest_splits = splits  # they find no space any more
    elif not normalizers and len(splits) == 1 and splits[0]["type"] == "Metaspace" and splits[0]["replacement"] == SPACE:
        rest_splits = [{**splits[0], "prepend_scheme": "never"}]
    else:
        return None
    decoders = [
        {**step, "prepend_scheme": "never"} if step["type"] == "Metaspace" else step
        for step in _steps(fields["decoder"], "decoders")
        if step["type"] != "Strip"
    ]
    rest = {
        **fields,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rest_splits},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    return pair_cuts(model["vocab"], known=None), rest


def _splits_at_spaces(split: dict) -> bool:
    return split["type"] == "Split" and split["pattern"] == {"String": " "}
