"""A SentencePiece model, BPE or unigram: Llama 2, Mistral, Gemma, and what tools/train_tokenizer.py trains.

Most models mark the beginning of a text with a space ("hello" is the piece "▁hello"). The pieces of a long text but the first are
encoded by a copy of the model that does not. A model that normalises its text (spm_train's default: NFKC, one space for several) is
cut only at single spaces, and the mark takes the place of the space that is left out.

A unigram model adds up scores in float32: of a text of millions of characters encoded at once the library's own sums are rounded so
far that near ties fall either way. Of pieces they are not.
"""

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from megacp.data.indexed_dataset import DatasetError
from megacp.data.safe_cuts import SPACE, Cuts, nowhere, pair_cuts, space_cuts
from megacp.data.tokenizer import Tokenizer, file_fingerprint


class SentencePieceTokenizer(Tokenizer):
    type = "SentencePiece"

    def __init__(self, path: Path):
        try:
            proto = ModelProto.FromString(path.read_bytes())
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
        except Exception as error:  # protobuf's DecodeError, the library's RuntimeError
            raise DatasetError(f"--tokenizer-model {path}: not a SentencePiece model ({error})") from error
        model = self._model
        self.vocab_size = model.vocab_size()
        self.bos = model.bos_id() if model.bos_id() >= 0 else None
        self.pad = model.pad_id() if model.pad_id() >= 0 else None
        self.eod = model.eos_id()
        if self.eod < 0:
            raise DatasetError(f"--tokenizer-model {path} has no end-of-sentence piece, which ends documents; train it with one")
        self.fingerprint = file_fingerprint(path)
        self.cuts, self._rest = _cuts_and_model_of_the_rest(proto, model)

    def encode_piece(self, text: str, first: bool) -> list[int]:
        return (self._model if first else self._rest).encode(text)

    def decode_piece(self, ids: list[int], first: bool) -> str:
        return (self._model if first else self._rest).decode(ids)


def _cuts_and_model_of_the_rest(proto: ModelProto, model: SentencePieceProcessor) -> tuple[Cuts, SentencePieceProcessor]:
    """Where a text may be cut, and the model for its pieces but the first."""
    normalizer, kinds = proto.normalizer_spec, ModelProto.SentencePiece
    in_text = (kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED)  # the others do not stand for the characters of their names
    vocabulary = [piece.piece for piece in proto.pieces if piece.type in in_text]
    known = frozenset(piece for piece in vocabulary if len(piece) == 1)
    if proto.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces or SPACE not in known:
        return nowhere, model
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return (space_cuts(vocabulary) if normalizer.add_dummy_prefix else nowhere), model
    bytes_for_unknown = any(piece.type == kinds.BYTE for piece in proto.pieces)
    unmarked = ModelProto()
    unmarked.CopyFrom(proto)
    unmarked.normalizer_spec.add_dummy_prefix = False
    return pair_cuts(vocabulary, None if bytes_for_unknown else known), SentencePieceProcessor(
        model_proto=unmarked.SerializeToString()
    )
