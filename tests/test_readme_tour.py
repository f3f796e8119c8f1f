"""README's tour, as it is written, on two CPU ranks: every command runs, and what comes out has learned and loads elsewhere.

Only sizes are made smaller. The model and its tokenizer are stand-ins of a few thousand weights in the folders that transformers
writes; the text is this project's own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacp.arguments import build_parser
from megacp.model.config import PRESETS
from tests.checkpointing.pretrained_models import hugging_face_model, reload
from tests.test_pretrain import records

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
PRETRAINED = "Llama-3.1-8B"
TOKENS = 512  # of a sequence
IN_SMALL = {
    "1048576": str(TOKENS),
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--context-parallel-size 8": "--context-parallel-size 2",
    "--train-iters 500": "--train-iters 20",
    "--lr 2e-5": "--lr 1e-2",
    "--lr-warmup-iters 20": "--lr-warmup-iters 2",
    "--eval-interval 50": "--eval-interval 10",
    "--vocab-size 32000": "--vocab-size 400",
}


def commands_of_the_tour():
    """The commands of each block of code in the section, without comments; a command on several lines is one."""
    section = re.search(r"^## A tour.*?(?=^## )", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL):
        lines = re.sub(r" +#.*", "", block).replace("\\\n", " ").splitlines()
        yield [" ".join(line.split()) for line in lines if line.strip()]


def write_pretrained(folder, text_files):
    """A small Llama with Llama 3's rotary scaling and a byte-level BPE tokenizer of its own, as transformers saves them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from megacp.data.split_patterns import LLAMA3

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in text_files], trainer)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    saved.save_pretrained(folder)
    model = hugging_face_model(vocab_size=len(saved), std=0.02, max_position_embeddings=128, bos_token_id=0, eos_token_id=1)
    model.to(torch.bfloat16).save_pretrained(folder)


def loss_on(folder, text):
    """Of the first tokens of `text`, with the folder's own tokenizer, by transformers alone."""
    ids_S = torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids[: TOKENS + 1])
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(reload(folder)(ids_S[None, :-1]).logits[0], ids_S[1:]).item()


def test_the_tour_runs_as_written(tmp_path):
    tour, on_the_way = commands_of_the_tour()
    assert tour[0] == ". examples/setup_env.sh" and len(tour) == 6, "set-up, then five commands"
    said = " ".join(tour + on_the_way)
    assert all(size in said for size in IN_SMALL), "the tour has changed: make its new sizes small too"

    (tmp_path / "my" / "text").mkdir(parents=True)
    for path in (ROOT / "megacp" / "data").glob("*.py"):
        (tmp_path / "my" / "text" / path.name).write_bytes(path.read_bytes())
    write_pretrained(tmp_path / PRETRAINED, sorted((tmp_path / "my" / "text").iterdir()))
    for name in ("tools", "pretrain_llama.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    output = {}
    for command in tour[1:] + on_the_way:
        for size, small in IN_SMALL.items():
            command = command.replace(size, small)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        output[command] = done.stdout

    config = transformers.AutoConfig.from_pretrained(tmp_path / "models" / "trained")
    assert config.max_position_embeddings == TOKENS
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("yarn", TOKENS / 64)
    text = (ROOT / "megacp" / "data" / "dataset.py").read_text(encoding="utf-8")
    before, after = (loss_on(tmp_path / "models" / name, text) for name in ("start", "trained"))
    assert after < before - 0.5
    assert [record["step"] for record in records(tmp_path / "runs" / "log.jsonl")] == list(range(1, 21))
    assert [record["step"] for record in records(tmp_path / "runs" / "log.valid.jsonl")] == [10, 20]
    assert (tmp_path / "loss.png").stat().st_size and (tmp_path / "data" / "tok.model").stat().st_size
    (shown,) = (text for command, text in output.items() if "inspect_data.py show" in command)
    assert f"{TOKENS} tokens" in shown


PAGES = ("README.md", "docs/attention.md", "docs/data.md", "docs/performance.md")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    tools = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tools").glob("*.py")}
    benchmark = [path.read_text(encoding="utf-8") for path in (ROOT / "megacp" / "benchmark").glob("*.py")]
    known = {option for action in build_parser()._actions for option in action.option_strings}
    known |= {flag for source in (*tools.values(), *benchmark) for flag in re.findall(r'"(--[a-z-]+)"', source)}
    known |= {"--standalone", "--nproc-per-node"}  # torchrun's
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    assert flags - known == set()
    files = re.findall(r"(?:tools|examples|docs|megacp|tests)/[\w/]+\.\w+|\b\w+\.py\b", text)
    assert files and not [name for name in files if not (ROOT / name).exists() and name not in tools]
    assert page != "README.md" or all(model in text for model in PRESETS)
