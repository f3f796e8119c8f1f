"""Evaluation gives the held-out loss of a plain float64 model on every layout, and training does not notice it."""

import functools
import io
import itertools
import json
import re
import sys

import numpy as np
import pytest
import torch

from megacp import parallel_state
from megacp.arguments import model_config_from_args, parse_args, validate_args
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.data.indexed_dataset import DatasetError, IndexedDatasetBuilder
from megacp.memory.counting import AllocationCounter
from megacp.parallel_state import ParallelLayout
from megacp.training.evaluation import Evaluator
from megacp.training.metrics import MetricsLogger, evaluation_log
from megacp.training.position_loss import EvaluationRecord, bucket_bounds
from megacp.training.sharding import allocate_weights, build_model
from megacp.training.step import step_settings
from megacp.training.training_data import TrainingData, open_training_data
from tests.distributed import RankFailure, run_distributed
from tests.reference import IGNORED_LABEL, reference_model
from tests.test_pretrain import MODEL, _main_with_own_group, data, numbers, records, train  # noqa: F401 (data is a fixture)
from tests.training.test_layout_invariance import EOD, FAMILIES, FLAGS, SEQ_LENGTH, LopsidedDataset
from tools.plot_loss import read_losses

FIRST_BUCKET = 3  # 0-3, 3-12, 12-48, 48-192 of sequences of 96 tokens
TOLERANCE = 1e-5  # relative, fp32 against float64
MASKS = ("document", "causal")
LAYOUTS = {
    "one rank": (1, "--micro-batch-size 2"),
    "C2, lean": (2, "--micro-batch-size 2 --context-parallel-size 2 --activation-memory lean --upipe-heads-per-stage 4"),
    "C4": (4, "--micro-batch-size 4 --context-parallel-size 4 --cp-comm-type a2a"),
    "DP2 x C2, host, attention again": (
        4, "--micro-batch-size 1 --context-parallel-size 2 --activation-memory host --recompute-granularity full"
    ),
}  # fmt: skip


def _evaluator(world_size, flags, dataset):
    args = parse_args(f"{FLAGS} --eval-interval 1 --eval-iters 2 {flags}".split())
    validate_args(args, world_size)
    args.eod_mask_loss = True  # refused together with --mock-data, whose place the dataset takes
    config = model_config_from_args(args)
    layout = ParallelLayout(world_size, args.context_parallel_size)
    parallel_state.initialize_model_parallel(layout)
    schedule = build_head_schedule(
        config.num_attention_heads, config.num_query_groups, layout.ulysses_degree, args.upipe_heads_per_stage
    )
    cpu = torch.device("cpu")
    settings = step_settings(args, config, layout, schedule, cpu, torch.float32)
    model = build_model(config, parallel_state.get_data_context_mesh(), torch.float32)
    allocate_weights(model, cpu, args.seed)
    held_out = TrainingData(dataset, EOD, 0, "", valid=dataset, test=dataset)
    evaluator = Evaluator(args, config, settings, model, held_out, cpu, torch.float32)
    evaluator.bounds = bucket_bounds(SEQ_LENGTH, FIRST_BUCKET)
    return evaluator, model, config, settings.store


def _evaluate(rank, world_size, flags):
    """A record for each mask, the weights and the model's config."""
    evaluator, model, config, store = _evaluator(world_size, flags, LopsidedDataset())
    found = {}
    for mask in MASKS:
        evaluator._args.attention_mask = mask
        found[mask], again = (evaluator.evaluate("valid", step, lambda: False) for step in (1, 2))
        assert (found[mask].losses, found[mask].tokens) == (again.losses, again.tokens), "the same samples and weights each time"
    assert evaluator.evaluate("valid", 3, lambda: True) is None
    assert store.forwards(0) == 0, "nothing was written to where training keeps its activations"
    return found, {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}, config


@functools.cache
def _one_rank(family):
    return run_distributed(_evaluate, 1, f"{FAMILIES[family]} {LAYOUTS['one rank'][1]}")


@functools.cache
def _expected(family, mask):
    """(loss, tokens) sums of each bucket over the 2 x 4 samples, by the plain model in float64."""
    _, weights, config = _one_rank(family)[0]
    params = {name: value.double() for name, value in weights.items()}
    bounds, dataset = bucket_bounds(SEQ_LENGTH, FIRST_BUCKET), LopsidedDataset()
    sums = [[0.0, 0] for _ in bounds[1:]]
    for sample in range(8):
        sequence = dataset.tokens(sample, 0, SEQ_LENGTH + 1).tolist()
        borders, labels = [0], [IGNORED_LABEL if token == EOD else label for token, label in itertools.pairwise(sequence)]
        for place in range(1, SEQ_LENGTH):
            if sequence[place - 1] == EOD != sequence[place]:
                borders.append(place)
        starts = [max(border for border in borders if border <= place) for place in range(SEQ_LENGTH)]
        in_document = [place - start for place, start in enumerate(starts)]
        attention = borders + [SEQ_LENGTH] if mask == "document" else [0, SEQ_LENGTH]
        _, logits = reference_model(
            params, torch.tensor(sequence[:-1]), torch.tensor(labels), torch.tensor(in_document), attention, config
        )
        for place, label in enumerate(labels):
            if label != IGNORED_LABEL:
                visible = in_document[place] if mask == "document" else place
                bucket = next(b for b, (start, stop) in enumerate(itertools.pairwise(bounds)) if start <= visible < stop)
                sums[bucket][0] += (torch.logsumexp(logits[place], 0) - logits[place, label]).item()
                sums[bucket][1] += 1
    return sums


@pytest.mark.parametrize("name, family", [*((name, "tied") for name in LAYOUTS), ("C2, lean", "untied")])
def test_losses_by_position_are_those_of_the_plain_model_on_every_layout(name, family):
    world_size, flags = LAYOUTS[name]
    by_rank = _one_rank(family) if name == "one rank" else run_distributed(_evaluate, world_size, f"{FAMILIES[family]} {flags}")
    for mask in MASKS:
        sums = _expected(family, mask)
        assert [count > 0 for _, count in sums] == [True, True, True, mask == "causal"], "documents are of less than 48 tokens"
        means = [loss / count if count else None for loss, count in sums]
        for found, _, _ in by_rank:  # the same on all ranks
            assert found[mask].tokens == tuple(count for _, count in sums)
            assert found[mask].losses == tuple(mean and pytest.approx(mean, rel=TOLERANCE) for mean in means)
            assert found[mask].loss == pytest.approx(sum(loss for loss, _ in sums) / sum(n for _, n in sums), rel=TOLERANCE)


def _peak_bytes(rank, world_size, num_layers):
    """The most that an evaluation allocates, beside its sharded weights."""
    flags = f"--num-layers {num_layers} --micro-batch-size 4 --activation-memory lean"
    evaluator, *_ = _evaluator(world_size, flags, LopsidedDataset())
    evaluator.evaluate("valid", 1, lambda: False)
    with AllocationCounter() as counter:
        evaluator.evaluate("valid", 1, lambda: False)
    return counter.peak_bytes(), counter.live_bytes()


def test_an_evaluation_holds_the_activations_of_one_layer_and_leaves_nothing():
    few, many = (run_distributed(_peak_bytes, 1, layers)[0] for layers in (2, 6))
    one_activation = 4 * SEQ_LENGTH * 32 * 4  # tokens, hidden size, fp32
    assert many[0] - few[0] < one_activation / 10
    assert few[0] > 3 * one_activation, "or nothing was counted"
    assert many[1] < 1000


# ---------------------------------------------------------------------------------------------------------- in a run


HELD_OUT = ["--eval-iters", 2, "--split", "6,2,2"]


def test_training_does_not_notice_evaluation(data, tmp_path):  # noqa: F811
    flags = [*MODEL, *data, *HELD_OUT, "--global-batch-size", 2, "--lr-decay-iters", 6, "--context-parallel-size", 2,
             "--activation-memory", "lean"]  # fmt: skip
    train([*flags, "--train-iters", 6, "--log-jsonl", tmp_path / "without.jsonl"], ranks=2)
    train([*flags, "--train-iters", 6, "--eval-interval", 2, "--log-jsonl", tmp_path / "twos.jsonl"], ranks=2)
    for stop in (4, 6):  # killed and resumed, with evaluations at other steps
        train([*flags, "--train-iters", stop, "--eval-interval", 3, "--log-jsonl", tmp_path / "threes.jsonl",
               "--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt"], ranks=2)  # fmt: skip
    straight = numbers(tmp_path / "without.jsonl")
    assert [step for step, *_ in straight] == [1, 2, 3, 4, 5, 6]
    assert numbers(tmp_path / "twos.jsonl") == straight and numbers(tmp_path / "threes.jsonl") == straight

    twos, threes = ({r["step"]: r for r in records(tmp_path / f"{name}.valid.jsonl")} for name in ("twos", "threes"))
    assert list(twos) == [2, 4, 6] and list(threes) == [3, 4, 6]
    for step in (4, 6):
        assert twos[step]["loss"] == threes[step]["loss"], "the same weights, the same samples"
    assert twos[2]["valid_tokens"] == 2 * 2 * 128 == twos[2]["tokens_0_32k"]
    assert twos[2]["loss"] == twos[2]["loss_0_32k"] > twos[6]["loss"]
    assert [r["step"] for r in records(tmp_path / "twos.test.jsonl")] == [6]
    assert [r["step"] for r in records(tmp_path / "threes.test.jsonl")] == [4, 6], "each of these runs had an end"
    steps, losses = read_losses(str(tmp_path / "twos.valid.jsonl"))
    assert steps.tolist() == [2, 4, 6] and losses[0] == twos[2]["loss"]


def test_training_does_not_notice_evaluation_of_untied_embeddings(data, tmp_path):  # noqa: F811
    flags = [*MODEL, *data, *HELD_OUT, "--untie-embeddings-and-output-weights", "--train-iters", 4]
    train([*flags, "--log-jsonl", tmp_path / "without"])
    train([*flags, "--log-jsonl", tmp_path / "with", "--eval-interval", 1])
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert [r["step"] for r in records(tmp_path / "with.valid")] == [1, 2, 3, 4]


def _train_interrupted_in_its_evaluation(rank, world_size, flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", lambda self, part, step, interrupted: None)
        _main_with_own_group(rank, world_size, flags)


def test_a_signal_during_evaluation_ends_the_run_with_a_checkpoint(data, tmp_path):  # noqa: F811
    flags = [*MODEL, *data, *HELD_OUT, "--eval-interval", 2, "--train-iters", 9]
    flags += ["--save", tmp_path, "--log-jsonl", tmp_path / "log"]
    run_distributed(_train_interrupted_in_its_evaluation, 1, [str(flag) for flag in flags])
    assert [r["step"] for r in records(tmp_path / "log")] == [1, 2]
    assert (tmp_path / "iter_0000002").is_dir()
    train([*flags, "--load", tmp_path, "--train-iters", 4])
    assert [r["step"] for r in records(tmp_path / "log.valid")] == [2, 4], "what was interrupted is made up for"


def _main_with_errors_in_files(rank, world_size, flags, folder):
    sys.stderr = (folder / f"errors{rank}").open("w")
    _main_with_own_group(rank, world_size, flags)


@pytest.mark.parametrize("flags, trained", [((), 3), (("--save-interval", 3), 3), (("--train-iters", 4, "--eval-interval", 5), 4)])
def test_held_out_data_that_one_rank_cannot_read_ends_the_run_with_all_training_saved(data, tmp_path, flags, trained):  # noqa: F811
    """Of the two sequences of the validation data one has a token outside the vocabulary, and each rank reads one."""
    with IndexedDatasetBuilder(tmp_path / "held", np.uint16) as builder:
        builder.add_document(np.full(100, 300))
        builder.add_document(np.full(200, 5))
        builder.finalize()
    paths = ["--train-data-path", data[1], "--tokenizer-type", "Byte", "--valid-data-path", tmp_path / "held"]
    flags = [*MODEL, *paths, "--eval-interval", 3, "--eval-iters", 1, "--train-iters", 9, *flags, "--save", tmp_path / "ckpt"]
    with pytest.raises(RankFailure, match="rank . of 2 died with exit code 2"):
        flags = [str(flag) for flag in (*flags, "--log-jsonl", tmp_path / "log")]
        run_distributed(_main_with_errors_in_files, 2, flags, tmp_path)
    assert [r["step"] for r in records(tmp_path / "log")] == list(range(1, trained + 1))
    assert [path.name for path in (tmp_path / "ckpt").glob("iter_*")] == [f"iter_{trained:07}"]
    errors = "".join((tmp_path / f"errors{rank}").read_text() for rank in (0, 1))  # the first to end may be the only one to speak
    assert re.search(rf"evaluation on the valid data after step {trained} not finished: .*(token id 300|another rank)", errors)
    assert f"; saved in {tmp_path / 'ckpt'}; --load {tmp_path / 'ckpt'} goes on from there" in errors


# --------------------------------------------------------------------------------------------------------------- logs


def test_console_tensorboard_and_json_lines(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    console = io.StringIO()
    valid = EvaluationRecord(20, "valid", ("0-32K", "32K-128K", "128K-512K"), (2.5, 2.25, None), (300, 100, 0), 2.4375, 1.5)
    with MetricsLogger(400, tensorboard_dir=str(tmp_path / "tb"), jsonl=str(tmp_path / "log.jsonl"), stream=console) as logger:
        logger.log_evaluation(valid)
        logger.log_evaluation(EvaluationRecord(400, "test", ("0-32K",), (2.5,), (3,), 2.5, 0.25))
    assert console.getvalue().splitlines() == [
        "eval  20/400 | loss   2.4375 | 0-32K   2.5000 | 32K-128K   2.2500 | 128K-512K no labels | 400 labels in 1.500 s",
        "test 400/400 | loss   2.5000 | 0-32K   2.5000 | 3 labels in 0.250 s",
    ]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = {"eval/loss", "eval/loss_0_32k", "eval/loss_32k_128k", "test/loss", "test/loss_0_32k"}
    assert set(events.Tags()["scalars"]) == tags
    assert [(e.step, e.value) for e in events.Scalars("eval/loss_32k_128k")] == [(20, 2.25)]
    assert (tmp_path / "log.jsonl").read_text() == "", "a step's object and nothing else"
    (line,) = evaluation_log(tmp_path / "log.jsonl", "valid").read_text().splitlines()
    assert json.loads(line)["loss_128k_512k"] is None and json.loads(line)["tokens_32k_128k"] == 100


# ------------------------------------------------------------------------------------------------------- held-out data


@pytest.fixture(scope="module")
def twelve_documents(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "twelve"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(12):
            builder.add_document(np.full(100, number))
        builder.finalize()
    return str(prefix)


def _open(*flags):
    args = parse_args(["--tokenizer-type", "Byte", "--vocab-size", "258", "--seq-length", "64", *map(str, flags)])
    validate_args(args, 1)
    return open_training_data(args, model_config_from_args(args))


def test_validation_and_test_are_of_documents_that_training_does_not_read(twelve_documents):
    opened = _open("--data-path", twelve_documents, "--split", "6,3,3", "--eval-interval", 5)
    seen = [{int(t) for i in range(len(part)) for t in part.tokens(i, 0, 64)} for part in (opened.train, opened.valid, opened.test)]
    assert seen[0] <= set(range(6)) and seen[1] <= set(range(6, 9)) and seen[2] <= set(range(9, 12)) and all(seen)


def test_without_evaluation_nothing_is_held_open(twelve_documents):
    opened = _open("--data-path", twelve_documents, "--split", "999,1,0")
    assert opened.valid is None and opened.test is None


def test_an_empty_validation_part_is_refused_and_an_empty_test_part_is_told(twelve_documents):
    with pytest.raises(DatasetError, match=r"--eval-interval 5 has nothing to evaluate: --split 999,1,0 leaves no document"):
        _open("--data-path", twelve_documents, "--split", "999,1,0", "--eval-interval", 5)
    opened = _open("--data-path", twelve_documents, "--split", "800,199,1", "--eval-interval", 5)
    assert opened.valid is not None and opened.test is None and "leaves no document" in opened.without_test


def test_separate_paths(twelve_documents, tmp_path):
    paths = ["--train-data-path", twelve_documents, "--valid-data-path", twelve_documents, "--eval-interval", 5]
    assert _open(*paths).test is None and len(_open(*paths).valid) == 1200 // 64
    assert len(_open(*paths, "--test-data-path", twelve_documents).test) == 1200 // 64
    with pytest.raises(DatasetError, match="missing"):
        _open(*paths, "--test-data-path", str(tmp_path / "missing"))


def test_mock_data_has_parts_of_its_own():
    opened = _open("--mock-data", "--eval-interval", 5)
    samples = [part.tokens(0, 0, 64).tolist() for part in (opened.train, opened.valid, opened.test)]
    assert samples[0] != samples[1] != samples[2] != samples[0]
