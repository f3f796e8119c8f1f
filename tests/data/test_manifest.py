"""Training with a tokenizer that did not make the data must not start: its ids would mean other text."""

import json

import numpy as np
import pytest

from megacp.arguments import parse_args
from megacp.data.indexed_dataset import DatasetError
from megacp.data.manifest import read_manifest
from megacp.data.tokenizer import build_tokenizer
from megacp.model.config import preset
from megacp.training.training_data import open_training_data
from tests.data.documents import write_dataset
from tests.data.tokenizers import PRE_TOKENIZERS, byte_level
from tools import pack_documents, preprocess_data


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    byte_level(PRE_TOKENIZERS["llama3"]).save(str(tmp_path / "tokenizer.json"))
    flags = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    preprocess_data.main([*flags, "--tokenizer-model", str(tmp_path / "tokenizer.json")])
    return tmp_path / "x"


def open_data(*flags):
    args = parse_args(["--model", "llama-tiny", "--seq-length", "16", "--split", "1,0,0", *map(str, flags)])
    return open_training_data(args, preset("llama-tiny"))


def test_the_tokenizer_that_made_it(prefix):
    data = open_data("--data-path", prefix, "--tokenizer-model", prefix.with_name("tokenizer.json"))
    assert (data.eod, data.vocab_size) == (1, build_tokenizer(None, str(prefix.with_name("tokenizer.json"))).vocab_size)


def test_another_tokenizer_is_refused(prefix, tmp_path):
    other = tmp_path / "other.json"
    byte_level(PRE_TOKENIZERS["qwen"]).save(str(other))
    made = r".*/x was made with HuggingFace .*/tokenizer.json \(sha256 .{12}\)"
    message = rf"{made}, but --tokenizer-model .*other.json is another tokenizer \(sha256 .{{12}}\)"
    plan = ["--input", str(prefix), "--output", str(tmp_path / "plan"), "--seq-length", "16"]
    pack_documents.main(plan)
    for flags in (["--data-path", prefix], ["--data-path", "1", prefix, "2", prefix], ["--train-data-path", prefix],
                  ["--data-path", tmp_path / "plan"]):  # fmt: skip
        with pytest.raises(DatasetError, match=f"^{flags[0]} {message}"):
            open_data(*flags, "--tokenizer-model", other)
    fine = write_dataset(tmp_path / "fine", [np.arange(40)], np.uint16).prefix  # no manifest tells what made it
    for flag in ("--valid-data-path", "--test-data-path"):
        held_out = ["--train-data-path", fine, "--valid-data-path", fine, flag, prefix]
        with pytest.raises(DatasetError, match=f"^{flag} {message}"):
            open_data(*held_out, "--tokenizer-model", other)
    with pytest.raises(SystemExit, match=f"--input {message}"):
        pack_documents.main([*plan[:3], str(tmp_path / "other"), *plan[4:], "--tokenizer-model", str(other)])
    with pytest.raises(DatasetError, match="but --tokenizer-model Byte is another"):
        open_data("--data-path", prefix, "--tokenizer-type", "Byte")


def test_data_without_a_manifest_is_taken(tmp_path):
    write_dataset(tmp_path / "x", [np.arange(40)], np.uint16)
    assert open_data("--data-path", tmp_path / "x", "--tokenizer-type", "Byte").eod == 257


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"format": 1}), json.dumps({"format": 2})])
def test_a_damaged_manifest_is_named(prefix, content):
    prefix.with_name("x.manifest.json").write_text(content)
    with pytest.raises(DatasetError, match=r"x\.manifest\.json: (not a manifest|format 2, expected 1)"):
        read_manifest(str(prefix))
