"""The tokenizer that the tool trains: lossless on code, indentation in few tokens."""

import json
import random
from collections import Counter

import pytest

from megacp.data.tokenizer import build_tokenizer
from tools import train_tokenizer

WORDS = random.Random(0).choices("abcdefghijklmnop", k=800)
NAMES = ["".join(WORDS[10 * i : 10 * i + 10]) for i in range(80)]
TEXTS = [
    f"class {name}:\n    def f(self):\n        if {i}:\n            return  'é' + str({i})\n\n\tend\r\n"
    for i, name in enumerate(NAMES)
]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path / "c.jsonl"


def train(corpus, *arguments):
    train_tokenizer.main(
        ["--input", str(corpus), "--output-prefix", str(corpus.parent / "out/t"), "--vocab-size", "330", *arguments]
    )
    return build_tokenizer("SentencePiece", str(corpus.parent / "out/t.model"))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_text_comes_back(corpus, model_type):
    tokenizer = train(corpus, "--model-type", model_type)
    assert tokenizer.vocab_size == 330
    for text in [*TEXTS, "  two\n\n\n\t\ttabs\r\n trailing  ", "漢字 \x00 \U0001f600", "<s></s><unk>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_indentation_is_few_tokens_and_line_feeds_are_their_own(corpus):
    tokenizer = train(corpus)
    assert len(tokenizer.encode("            return")) <= 4
    line_feed = tokenizer.encode("\n")
    assert len(line_feed) == 1 and tokenizer.encode("a\n\nb").count(line_feed[0]) == 2
    assert tokenizer.cuts("a\nb", 1) == (1, 1)  # long documents in pieces


def test_same_model_each_time_for_a_seed(corpus):
    models = []
    for seed in ("1", "1", "2"):
        train(corpus, "--max-lines", "150", "--seed", seed)  # fewer lines than there are
        models.append((corpus.parent / "out/t.model").read_bytes())
        (corpus.parent / "out/t.model").unlink()
    assert models[0] == models[1] != models[2]


def test_every_line_has_the_same_chance():
    counts = Counter(line for seed in range(2000) for line in train_tokenizer.draw(iter("abcdefgh"), 3, seed))
    assert sum(counts.values()) == 6000 and all(abs(counts[line] - 750) < 5 * 750**0.5 for line in "abcdefgh")
    assert train_tokenizer.draw(iter("abc"), 3, 0) == ["a", "b", "c"]


def test_sizes_that_the_text_does_not_support(corpus):
    with pytest.raises(SystemExit, match=r"--vocab-size 5000 is more than this text has pieces for; \d+ or less works"):
        train(corpus, "--vocab-size", "5000")
    with pytest.raises(SystemExit, match=r"--vocab-size 200 is too small .* more than \d+ works"):
        train(corpus, "--vocab-size", "200")
    assert not (corpus.parent / "out").exists()


def test_a_tokenizer_that_is_there_is_kept(corpus):
    train(corpus)
    before = (corpus.parent / "out/t.model").read_bytes()
    with pytest.raises(SystemExit, match="out/t.model exists, and data may need it; name another prefix"):
        train(corpus, "--max-lines", "150")
    assert (corpus.parent / "out/t.model").read_bytes() == before
    with pytest.raises(SystemExit, match="out/: takes a folder and a name"):
        train(corpus, "--output-prefix", f"{corpus.parent}/out/")


@pytest.mark.parametrize("flag, value", [("--vocab-size", "0"), ("--max-lines", "0"), ("--character-coverage", "99.95")])
def test_numbers_that_cannot_be(corpus, capsys, flag, value):
    with pytest.raises(SystemExit):
        train(corpus, flag, value)
    assert f"error: {flag} {value} must be" in capsys.readouterr().err


def test_bad_input_is_named(corpus):
    (corpus.parent / "b.txt").write_bytes(b"\xfe")
    with pytest.raises(SystemExit, match=r"b\.txt: byte 0xfe at offset 0"):
        train(corpus.parent / "b.txt")
