"""Tokenizers: lossless, ids in range, documents cannot forge special tokens, the type told by the file."""

import functools
import hashlib
import json
import unicodedata

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from megacp.data.indexed_dataset import DatasetError
from megacp.data.tokenizer import build_tokenizer
from megacp.data.tokenizer_huggingface import _COMPOSED
from tests.data.tokenizers import PRE_TOKENIZERS, byte_level, made_up_ranks, rank_lines, sentencepiece_model

texts = st.text(alphabet=st.sampled_from("ab f(1)\n\n \t\r.'é漢\u0301<|>"), max_size=60)


@pytest.fixture(scope="module")
def code_model(tmp_path_factory):
    """As tools/train_tokenizer.py makes it: white space kept, the line feed a piece of its own."""
    return sentencepiece_model(
        tmp_path_factory.mktemp("sp") / "code.model", normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, user_defined_symbols=["\n", "\t"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    byte_level(PRE_TOKENIZERS["llama3"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama3_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"
    path.write_bytes(rank_lines(made_up_ranks(128_000)))
    return path


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

    def test_refusals(self, tmp_path):
        (tmp_path / "x.model").write_bytes(b"not a model")
        with pytest.raises(DatasetError, match=r"--tokenizer-model .*x\.model: not a SentencePiece model"):
            build_tokenizer("SentencePiece", str(tmp_path / "x.model"))
        path = sentencepiece_model(tmp_path / "no_eos.model", eos_id=-1)
        with pytest.raises(DatasetError, match="no end-of-sentence piece"):
            build_tokenizer("SentencePiece", str(path))


class TestHuggingFace:
    def test_special_ids_and_text_that_spells_them(self, tokenizer_json):
        tokenizer = build_tokenizer("HuggingFace", str(tokenizer_json / "tokenizer.json"))
        size = Tokenizer.from_file(str(tokenizer_json / "tokenizer.json")).get_vocab_size()
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (0, 1, size)
        ids = tokenizer.encode("a<|end_of_text|>b")
        assert not {0, 1, 2} & set(ids) and tokenizer.decode(ids) == "a<|end_of_text|>b"

    def test_vocab_size_counts_to_the_largest_id(self, tmp_path):
        model = byte_level(PRE_TOKENIZERS["qwen"])
        without = model.get_vocab_size()
        model.add_special_tokens(["<|pad|>"])
        model.save(str(tmp_path / "tokenizer.json"))
        assert build_tokenizer("HuggingFace", str(tmp_path)).vocab_size == without + 1

    def test_end_of_document_by_config(self, tmp_path):
        byte_level(PRE_TOKENIZERS["qwen"], special=["<stop>"]).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(DatasetError, match=r"no token ends a document; looked for .*<\|endoftext\|>.*tokenizer_config"):
            build_tokenizer("HuggingFace", str(tmp_path))
        for eos in ("<stop>", {"content": "<stop>"}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": None}))
            tokenizer = build_tokenizer("HuggingFace", str(tmp_path))
            assert (tokenizer.bos, tokenizer.eod) == (None, 0)

    def test_text_that_is_not_normalised_needs_none(self):
        """The characters that let a text pass unnormalised: composed, and with nothing beside them that composes."""
        passing = [c for c in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]) if _COMPOSED(c)]
        assert len(passing) > 30_000 and all(unicodedata.normalize("NFC", c) == c for c in passing)
        pairs = [unicodedata.decomposition(c).split() for c in map(chr, range(0x110000))]
        seconds = {chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
        jamo = {chr(c) for c in range(0x1100, 0x1200)}
        assert not (seconds | jamo) & set(passing)

    def test_ordinary_words_are_no_special_tokens(self, tmp_path):
        """Qwen's vocabulary has the words "<s>" and "</s>", which begin and end nothing."""
        vocabulary = {name: i for i, name in enumerate(["<s>", "</s>", "<|endoftext|>", "<pad>", "a"])}
        model = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        model.add_special_tokens(["<|endoftext|>"])
        model.save(str(tmp_path / "tokenizer.json"))
        tokenizer = build_tokenizer("HuggingFace", str(tmp_path))
        assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (None, 2, None)

    def test_an_instruct_config_does_not_change_the_end_of_document(self, tokenizer_json, tmp_path):
        (tmp_path / "tokenizer.json").write_bytes((tokenizer_json / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
        assert build_tokenizer("HuggingFace", str(tmp_path)).eod == 1

    def test_not_a_tokenizer(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DatasetError, match=r"tokenizer\.json: not a tokenizer\.json"):
            build_tokenizer("HuggingFace", str(tmp_path))


class TestTiktoken:
    def test_llama3_ids(self, llama3_ranks):
        """The ids of Meta's release: 128,000 ranks, then 256 special tokens."""
        tokenizer = build_tokenizer("Tiktoken", str(llama3_ranks))
        assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (128_256, 128_000, 128_001, 128_004)
        names = {128_002: "<|reserved_special_token_0|>", 128_006: "<|start_header_id|>", 128_007: "<|end_header_id|>",
                 128_009: "<|eot_id|>", 128_011: "<|reserved_special_token_2|>", 128_255: "<|reserved_special_token_246|>"}  # fmt: skip
        for i, name in names.items():
            assert tokenizer.decode([i]) == name
        ids = tokenizer.encode("a<|end_of_text|>b")
        assert max(ids) < 128_000 and tokenizer.decode(ids) == "a<|end_of_text|>b"

    @settings(max_examples=50, deadline=None)
    @given(text=st.text(max_size=40))
    def test_lossless(self, llama3_ranks, text):
        tokenizer = _tiktoken(llama3_ranks)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_refusals(self, tmp_path):
        path = tmp_path / "x.model"
        for content, message in [
            (rank_lines(made_up_ranks(500)), r"x\.model: 500 ranks up to 499, expected 128,000 or 151,643"),
            (b"IQ== 0\nIg==\n", r"x\.model: line 2 is not `base64 rank`: b'Ig=="),
            (b"IQ== 0\nIg== one\n", r"x\.model: line 2 is not `base64 rank`"),
            (b"I*Q== 0\n", r"x\.model: line 1 is not `base64 rank`"),
        ]:
            path.write_bytes(content)
            with pytest.raises(DatasetError, match=message):
                build_tokenizer("Tiktoken", str(path))


_tiktoken = functools.cache(lambda path: build_tokenizer("Tiktoken", str(path)))


class TestTypeByFile:
    def test_every_type(self, code_model, tokenizer_json, llama3_ranks):
        for model, wanted in [(code_model, "SentencePiece"), (tokenizer_json, "HuggingFace"), (llama3_ranks, "Tiktoken"),
                              (llama3_ranks.parent, "Tiktoken"), (tokenizer_json / "tokenizer.json", "HuggingFace")]:  # fmt: skip
            assert build_tokenizer(None, str(model)).type == wanted
        assert str(build_tokenizer(None, str(llama3_ranks))) == "Tiktoken, 128,256 ids, bos 128000, eod 128001, pad 128004"

    def test_fingerprint_is_the_hash_of_the_file(self, code_model, tokenizer_json):
        for model, file in [(code_model, code_model), (tokenizer_json, tokenizer_json / "tokenizer.json")]:
            assert build_tokenizer(None, str(model)).fingerprint == hashlib.sha256(file.read_bytes()).hexdigest()

    def test_refusals(self, tmp_path):
        (tmp_path / "x").write_bytes(b"\x89PNG")
        with pytest.raises(DatasetError, match=r"--tokenizer-model .*x: neither a tokenizer.json, nor .* begins with b'.x89PNG'"):
            build_tokenizer(None, str(tmp_path / "x"))
        with pytest.raises(DatasetError, match=r"tokenizer\.json is not a file; nor is tokenizer\.model"):
            build_tokenizer(None, str(tmp_path))
        with pytest.raises(DatasetError, match="no --tokenizer-type Byte, and no --tokenizer-model, a tokenizer.model"):
            build_tokenizer(None)


def test_flags_are_named(tmp_path):
    with pytest.raises(DatasetError, match="--tokenizer-type Word is none of SentencePiece, HuggingFace, Tiktoken, Byte"):
        build_tokenizer("Word")
    with pytest.raises(DatasetError, match="--tokenizer-type SentencePiece needs --tokenizer-model, a .model file"):
        build_tokenizer("SentencePiece")
    with pytest.raises(DatasetError, match=r"--tokenizer-model .*tokenizer\.json is not a file"):
        build_tokenizer("HuggingFace", str(tmp_path))
