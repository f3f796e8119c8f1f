"""Tokenizers: lossless, ids in range, documents cannot forge special tokens, long texts cut without changing an id."""

import io
import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megacp.data import safe_cuts
from megacp.data.indexed_dataset import DatasetError
from megacp.data.tokenizer import _SPLITS_OF_LLAMA3_AND_QWEN, build_tokenizer

CORPUS = [f"def f{i}(x):\n    # the {i}th case\n    if x > {i}:\n\treturn  x * {i}\n\n\n" for i in range(60)]
texts = st.text(alphabet=st.sampled_from("ab f(1)\n\n \t\r.'é漢\u0301<|>"), max_size=60)


def sentencepiece_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.split("\n") if line), model_writer=model, vocab_size=330,
        model_type="bpe", byte_fallback=True, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def code_model(tmp_path_factory):
    """As tools/train_tokenizer.py makes it: white space kept, the line feed a piece of its own."""
    return sentencepiece_model(
        tmp_path_factory.mktemp("sp") / "code.model", normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, user_defined_symbols=["\n", "\t"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def prose_model(tmp_path_factory):
    """As Llama 2's: a dummy prefix, so that a cut would change ids."""
    return sentencepiece_model(tmp_path_factory.mktemp("sp") / "prose.model")


@pytest.fixture(scope="module")
def prefixed_model(tmp_path_factory):
    """The line feed is a piece of its own, but a text's start is marked, so that a cut would change ids."""
    return sentencepiece_model(tmp_path_factory.mktemp("sp") / "prefixed.model", user_defined_symbols=["\n"])


@pytest.fixture(scope="module")
def spanning_model(tmp_path_factory):
    """A second piece holds a line feed and the text after it."""
    return sentencepiece_model(
        tmp_path_factory.mktemp("sp") / "spanning.model",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", "\nf"],
    )


def byte_level(pre_tokenizer, special=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")):
    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizer
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=list(special), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(CORPUS, trainer)
    return model


def split_then_bytes(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "llama3": split_then_bytes(_SPLITS_OF_LLAMA3_AND_QWEN[0]),
    "qwen": split_then_bytes(_SPLITS_OF_LLAMA3_AND_QWEN[1]),
}


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def tokenizer_json(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    byte_level(PRE_TOKENIZERS[request.param]).save(str(folder / "tokenizer.json"))
    return folder


class TestByte:
    @given(text=st.text())
    def test_is_utf8(self, text):
        tokenizer = build_tokenizer("Byte")
        ids = tokenizer.encode(text)
        assert bytes(ids) == text.encode() and tokenizer.decode([tokenizer.bos, *ids, tokenizer.eod]) == text
        assert max([*ids, tokenizer.bos, tokenizer.eod]) < tokenizer.vocab_size == 258


class TestSentencePiece:
    @settings(max_examples=150, deadline=None)
    @given(text=st.one_of(texts, st.text(max_size=40)).filter(lambda text: "\u2581" not in text))
    def test_white_space_survives(self, code_model, text):
        tokenizer = build_tokenizer("SentencePiece", str(code_model))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and all(0 <= i < tokenizer.vocab_size for i in ids)

    def test_special_ids(self, code_model):
        tokenizer = build_tokenizer("SentencePiece", str(code_model))
        library = sentencepiece.SentencePieceProcessor(model_file=str(code_model))
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (library.bos_id(), library.eos_id(), 330)
        assert not {tokenizer.bos, tokenizer.eod} & set(tokenizer.encode("<s>text</s>"))

    @settings(max_examples=150, deadline=None)
    @given(text=texts)
    @pytest.mark.parametrize("which", ["code_model", "prose_model", "prefixed_model", "spanning_model"])
    def test_cuts_change_no_id(self, request, which, text):
        path = request.getfixturevalue(which)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megacp.data.tokenizer.pieces", lambda text: safe_cuts.pieces(text, 1))
            ids = build_tokenizer("SentencePiece", str(path)).encode(text)
        assert ids == sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(text)

    def test_refusals(self, tmp_path):
        (tmp_path / "x.model").write_bytes(b"not a model")
        with pytest.raises(DatasetError, match=r"--tokenizer-model .*x\.model: not a SentencePiece model"):
            build_tokenizer("SentencePiece", str(tmp_path / "x.model"))
        path = sentencepiece_model(tmp_path / "no_eos.model", eos_id=-1)
        with pytest.raises(DatasetError, match="no end-of-sentence piece"):
            build_tokenizer("SentencePiece", str(path))


class TestHuggingFace:
    @settings(max_examples=100, deadline=None)
    @given(text=texts)
    def test_cuts_change_no_id(self, tokenizer_json, text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megacp.data.tokenizer.pieces", lambda text: safe_cuts.pieces(text, 1))
            tokenizer = build_tokenizer("HuggingFace", str(tokenizer_json))
            assert tokenizer._cuttable
            ids = tokenizer.encode(text)
        library = Tokenizer.from_file(str(tokenizer_json / "tokenizer.json"))
        assert ids == library.encode(text, add_special_tokens=False).ids

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)),
            lambda model: setattr(model, "pre_tokenizer", split_then_bytes(r"[a-z\n]+|.")),
            lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.Metaspace()),
            lambda model: setattr(model, "normalizer", normalizers.Replace("\n", "")),
            lambda model: model.add_tokens([AddedToken("\nclass", normalized=False)]),
        ],
        ids=["gpt2", "own split", "metaspace", "normalizer", "added token"],
    )
    def test_other_tokenizers_get_the_text_whole(self, tmp_path, change):
        model = byte_level(PRE_TOKENIZERS["qwen"])
        change(model)
        model.save(str(tmp_path / "tokenizer.json"))
        assert not build_tokenizer("HuggingFace", str(tmp_path))._cuttable

    def test_special_ids_and_text_that_spells_them(self, tokenizer_json):
        tokenizer = build_tokenizer("HuggingFace", str(tokenizer_json / "tokenizer.json"))
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (0, 1, 280)
        ids = tokenizer.encode("a<|end_of_text|>b")
        assert not {0, 1, 2} & set(ids) and tokenizer.decode(ids) == "a<|end_of_text|>b"

    def test_vocab_size_counts_to_the_largest_id(self, tmp_path):
        model = byte_level(PRE_TOKENIZERS["qwen"])
        model.add_special_tokens(["<|pad|>"])
        model.save(str(tmp_path / "tokenizer.json"))
        assert build_tokenizer("HuggingFace", str(tmp_path)).vocab_size == 281

    def test_end_of_document_by_config(self, tmp_path):
        byte_level(PRE_TOKENIZERS["qwen"], special=["<stop>"]).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(DatasetError, match=r"no token ends a document; looked for .*<\|endoftext\|>.*tokenizer_config"):
            build_tokenizer("HuggingFace", str(tmp_path))
        for eos in ("<stop>", {"content": "<stop>"}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": None}))
            tokenizer = build_tokenizer("HuggingFace", str(tmp_path))
            assert (tokenizer.bos, tokenizer.eod) == (None, 0)

    def test_an_instruct_config_does_not_change_the_end_of_document(self, tokenizer_json, tmp_path):
        (tmp_path / "tokenizer.json").write_bytes((tokenizer_json / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
        assert build_tokenizer("HuggingFace", str(tmp_path)).eod == 1

    def test_not_a_tokenizer(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DatasetError, match=r"tokenizer\.json: not a tokenizer\.json"):
            build_tokenizer("HuggingFace", str(tmp_path))


@given(text=texts, piece_chars=st.integers(1, 20))
def test_pieces_partition_the_text(text, piece_chars):
    parts = list(safe_cuts.pieces(text, piece_chars))
    assert "".join(parts) == text
    for part, following in zip(parts, parts[1:]):
        assert len(part) >= piece_chars and part.endswith("\n") and not following[0].isspace()


def test_flags_are_named(tmp_path):
    with pytest.raises(DatasetError, match="--tokenizer-type Word is none of SentencePiece, HuggingFace, Byte"):
        build_tokenizer("Word")
    with pytest.raises(DatasetError, match="--tokenizer-type SentencePiece needs --tokenizer-model, a .model file"):
        build_tokenizer("SentencePiece")
    with pytest.raises(DatasetError, match=r"--tokenizer-model .*tokenizer\.json is not a file"):
        build_tokenizer("HuggingFace", str(tmp_path))
