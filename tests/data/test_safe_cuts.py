"""Long texts in pieces: the ids of the whole, whatever the text, the tokenizer and the place of the cuts; and what cannot be cut."""

import json
import random

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megacp.data.safe_cuts import StretchTooLong, byte_level_cuts, nowhere, pieces, space_cuts
from megacp.data.tokenizer import build_tokenizer
from tests.data.tokenizers import (
    PRE_TOKENIZERS,
    byte_level,
    mistral_sentencepiece,
    qwen_ranks,
    rank_lines,
    sentencepiece_model,
    split_then_bytes,
)

# What decides where tokens end: line feeds, blanks of all kinds, digits, contractions, marks that combine, letters without
# blanks, signs of several characters, special and added tokens; and words, so that merges happen.
FRAGMENTS = [
    *"ab1.,'\n\r\t 漢。，é/<|>_-(\u0301\u200d😀\u00a0\u3000\u2028\u2581ａ½ſ가\u1161\u0903", "  ", "   ", "\n\n", "\r\n", "  \n", "👍🏽", "the", " of", "'s", "'LL", " it's", "!\n/",
    "return", "def f(x):", "012345", "====", "!/", "<think>", "</s>", "<|eot_id|>", "한국", "你好", "e\u0301", "Ab",
]  # fmt: skip
runs = st.builds(lambda fragment, times: fragment * times, st.sampled_from(FRAGMENTS), st.integers(1, 12))
texts = st.lists(st.one_of(runs, st.text(max_size=6)), max_size=14).map("".join)


def check(tokenizer, whole, text, alike=lambda ours, ids: False):
    """Pieces as short as the cuts allow, and longer ones. `alike`: whether other ids than the whole's are as good."""
    for piece_chars in (1, 5):
        ours, ids = tokenizer.encode(text, piece_chars=piece_chars), whole(text)
        assert ours == ids or alike(ours, ids)


def tied(model):
    """Of a unigram model, where two ways to split a run score alike to float32, what stands before it decides: the library's sums."""

    def alike(ours, ids):
        (score, text), (exact, same) = ((sum(map(model.get_score, x)), "".join(map(model.id_to_piece, x))) for x in (ours, ids))
        return text == same and score == pytest.approx(exact, rel=1e-6)

    return alike


class Model:
    """A tokenizer, and its library's own encoding of a whole text."""

    def __init__(self, path, unigram=False):
        self.tokenizer = build_tokenizer(None, str(path))
        if self.tokenizer.type == "HuggingFace":
            library = Tokenizer.from_file(str(path))
            library.encode_special_tokens = True
            self.whole = lambda text: library.encode(text, add_special_tokens=False).ids
        elif self.tokenizer.type == "SentencePiece":
            library = sentencepiece.SentencePieceProcessor(model_file=str(path))
            self.whole, self.alike = library.encode, tied(library) if unigram else lambda ours, ids: False
        else:
            self.whole = self.tokenizer._encoding.encode_ordinary

    def number_of_pieces(self, text):
        return len(list(pieces([text], self.tokenizer.cuts, piece_chars=1)))


KEPT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE = {  # options, and whether "f(x): return 12 of 34\n" can be cut
    "code, as train_tokenizer makes it": ({**KEPT, "add_dummy_prefix": False, "user_defined_symbols": ["\n", "\t"]}, True),
    "llama 2": (KEPT, True),
    "llama 2, no bytes": ({**KEPT, "byte_fallback": False, "vocab_size": 90}, True),
    "unigram": ({**KEPT, "model_type": "unigram"}, True),
    "spanning symbols": ({**KEPT, "add_dummy_prefix": False, "user_defined_symbols": ["\n", "\nf"]}, True),
    "spm_train's default": ({}, True),
    "default, no bytes": ({"byte_fallback": False, "vocab_size": 90, "model_type": "unigram"}, True),
    "lower case": ({"normalization_rule_name": "nmt_nfkc_cf"}, True),
    "words together": ({"split_by_whitespace": False}, True),
    "normalised, unmarked": ({"add_dummy_prefix": False}, False),
    "space behind": ({**KEPT, "treat_whitespace_as_suffix": True}, False),
}


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def small_sentencepiece(request, tmp_path_factory):
    options, cuttable = SENTENCEPIECE[request.param]
    path = sentencepiece_model(tmp_path_factory.mktemp("sp") / "x.model", **options)
    return Model(path, unigram=options.get("model_type") == "unigram"), cuttable


@settings(max_examples=80, deadline=None)
@given(text=texts)
@example(text="b it's012345")  # "34", "5" and "3", "45" score alike in a unigram model
def test_sentencepiece(small_sentencepiece, text):
    model, _ = small_sentencepiece
    check(model.tokenizer, model.whole, text, model.alike)


def test_sentencepiece_is_cut_where_it_can_be(small_sentencepiece):
    model, cuttable = small_sentencepiece
    assert (model.number_of_pieces("(x): return 12 of 34\n" * 3) > 1) == cuttable


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def small_byte_level(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer = byte_level(PRE_TOKENIZERS[request.param])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(path))
    return Model(path)


@settings(max_examples=120, deadline=None)
@given(text=texts)
@example(text=" it's")  # one token for GPT-4o
@example(text="!\n/")
@example(text="a\n\nb")  # GPT-2 sees two tokens in the white space
def test_byte_level(small_byte_level, text):
    check(small_byte_level.tokenizer, small_byte_level.whole, text)


def test_byte_level_is_cut(small_byte_level):
    assert small_byte_level.number_of_pieces("a b") > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda model: setattr(model, "pre_tokenizer", split_then_bytes(r"[a-z\n]+|.")),
        lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda model: setattr(model, "normalizer", normalizers.Replace("\n", "")),
        lambda model: setattr(model, "normalizer", normalizers.NFKC()),
        lambda model: model.add_tokens([AddedToken("a class", normalized=False)]),
        lambda model: model.add_tokens([AddedToken("<x>", rstrip=True)]),
        lambda model: model.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda model: model.add_tokens([AddedToken("0x", single_word=True)]),
    ],
    ids=["prefix", "own split", "words", "normalizer", "NFKC", "added text", "rstrip", "lstrip", "single word"],
)
def test_what_is_not_proven_stays_whole(tmp_path, change):
    model = byte_level(PRE_TOKENIZERS["qwen"])
    change(model)
    model.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer("HuggingFace", str(tmp_path)).cuts is nowhere


@pytest.fixture(scope="module", params=["mistral", "mistral json", "mistral json, metaspace", "qwen", "llama3 size", "qwen json"])
def real(request, tmp_path_factory):
    """Mistral's 32,000 SentencePiece pieces, also as a tokenizer.json; Qwen's table whole, at the size of Llama 3's, and the first
    20,000 of it as a tokenizer.json."""
    kind, path = request.param, tmp_path_factory.mktemp("real") / "tokenizer"
    if kind == "mistral":
        path = mistral_sentencepiece()
    elif kind.startswith("mistral json"):
        _as_tokenizer_json(mistral_sentencepiece(), path, "metaspace" in kind)
    elif kind == "qwen":
        path = qwen_ranks()
    elif kind == "llama3 size":
        path.write_bytes(b"".join(qwen_ranks().open("rb").readlines()[:128_000]))
    else:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        path.write_bytes(b"".join(qwen_ranks().open("rb").readlines()[:20_000]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIKTOKEN_CACHE_DIR", "")  # else the library keeps a copy of the file by its path
            vocabulary, merges = TikTokenConverter(str(path)).extract_vocab_merges_from_model(str(path))
        byte_level(PRE_TOKENIZERS["qwen"], ["<|endoftext|>"], models.BPE(vocabulary, merges)).save(str(path))
    return Model(path)


class TestRealVocabularies:
    @settings(max_examples=120, deadline=None)
    @given(text=texts)
    def test_pieces_are_the_whole(self, real, text):
        check(real.tokenizer, real.whole, text)

    def test_long_text_of_all_kinds(self, real):
        """100,000 fragments in pieces of 1,000 characters; runs that no cut falls into are among them."""
        draw = random.Random(5)
        text = "".join(
            draw.choice(FRAGMENTS) * draw.choice([1, 1, 1, 2, 3, 2000 if draw.random() < 0.002 else 1]) for _ in range(100_000)
        )
        found = [piece.text for piece in pieces([text], real.tokenizer.cuts, piece_chars=1000)]
        assert "".join(found) == text and len(found) > 0.4 * len(text) / 1000
        assert real.tokenizer.encode(text, piece_chars=1000) == real.whole(text)

    @pytest.mark.parametrize("script", ["漢字假名交じり文", "ひらがな", "0123456789", "abcdefgh", "😀👍🏽", "<=>"])
    def test_a_line_without_spaces(self, real, script):
        draw = random.Random(3)
        text = "".join(draw.choice(script) for _ in range(3000))
        assert real.tokenizer.encode(text, piece_chars=10) == real.whole(text)


def _as_tokenizer_json(sentencepiece_file, path, metaspace):
    """A SentencePiece BPE model as transformers converts it, in the older form (a normalizer) and the newer (Metaspace)."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    vocabulary = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    merges = [
        (-vocabulary[piece], piece[:i], piece[i:])
        for piece in vocabulary
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    bpe = models.BPE(vocabulary, [merge[1:] for merge in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Metaspace("\u2581", "first", split=False), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(back)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))
    return path


LETTERS_END = byte_level_cuts(line_ends=False)


class TestPieces:
    @pytest.mark.parametrize("cuts", [LETTERS_END, space_cuts(["\u2581a"])], ids=["byte level", "spaces"])
    @given(text=texts, piece_chars=st.integers(1, 20), sizes=st.lists(st.integers(1, 30), max_size=20))
    def test_chunks_of_any_size_give_the_same_pieces(self, cuts, text, piece_chars, sizes):
        chunks, begin = [], 0
        for size in sizes:
            chunks.append(text[begin : begin + size])
            begin += size
        chunks.append(text[begin:])
        found = list(pieces(chunks, cuts, piece_chars))
        assert found == list(pieces([text], cuts, piece_chars)) and all(len(piece.text) >= piece_chars for piece in found[:-1])
        assert cuts is not LETTERS_END or "".join(piece.text for piece in found) == text

    def test_a_cut_at_the_end_of_a_chunk_waits_for_the_next(self):
        for cuts in (LETTERS_END, space_cuts(["\u2581a"])):
            assert list(pieces("a b c d", cuts, 1)) == list(pieces(["a b c d"], cuts, 1))

    @given(text=texts)
    def test_place_of_each_piece(self, text):
        begin = 0
        for piece in pieces([text], LETTERS_END, 3):
            assert (piece.first, piece.line, piece.byte) == (begin == 0, 1 + text[:begin].count("\n"), len(text[:begin].encode()))
            begin += len(piece.text)

    def test_a_space_left_out_counts(self):
        found = list(pieces(["é a\nb c"], space_cuts(["\u2581a"]), 1))
        assert [(piece.text, piece.line, piece.byte) for piece in found] == [("é", 1, 0), ("a\nb", 1, 3), ("c", 2, 7)]

    @pytest.mark.parametrize("chunk", [1, 7, 1000])
    def test_the_guard_names_the_place(self, chunk):
        """Lines of 5, 3 and 55 characters; from the 12th on (after two x) the next cut is 48 away."""
        text = "é 12\nab\n" + "x" * 50 + " end"
        chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
        cuts = byte_level_cuts(line_ends=True)
        with pytest.raises(StretchTooLong, match=r"line 3, byte 11: no place in 47 characters .*--max-stretch-chars above 47"):
            list(pieces(chunks, cuts, piece_chars=10, limit=47))
        assert [piece.text for piece in pieces(chunks, cuts, piece_chars=10, limit=48)] == [text[:-4], " end"]

    def test_the_guard_holds_for_what_cannot_be_cut(self):
        with pytest.raises(StretchTooLong, match="line 1, byte 2: no place in 9 "):
            list(pieces(["a b " * 3], nowhere, piece_chars=2, limit=9))
        assert [piece.text for piece in pieces(["a b " * 3], nowhere, piece_chars=2, limit=10)] == ["a b " * 3]


class TestTiktokenBlanks:
    """tiktoken panics at a run of about a million blanks; the ids must be those of shorter runs by the same rule."""

    def test_a_long_run(self, tmp_path):
        from tests.data.tokenizers import made_up_ranks

        (tmp_path / "tokenizer.model").write_bytes(rank_lines(made_up_ranks(128_000)))
        tokenizer = build_tokenizer(None, str(tmp_path))
        text = "ab" + " " * 1_200_000 + "c'll d\n" * 3
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == [*tokenizer.encode("ab"), *tokenizer._encoding._core_bpe.encode_single_piece(b" " * 1_199_999),
                       *tokenizer.encode(" c'll d\n" + "c'll d\n" * 2)]  # fmt: skip
        below = "ab" + " " * 450_000 + "c'll d\n" * 3
        assert tokenizer.encode(below) == tokenizer._encoding.encode_ordinary(below)


def test_tokenizer_json_with_a_length_does_not_cut_documents(tmp_path):
    model = byte_level(PRE_TOKENIZERS["qwen"])
    model.enable_truncation(4)
    model.enable_padding(length=100)
    model.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]
    tokenizer = build_tokenizer(None, str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("f(x): return 1")) == "f(x): return 1"
