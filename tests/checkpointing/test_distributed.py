"""What is loaded is what was saved: bit by bit, on any number of ranks, and refused when it is not whole."""

import json
import random
import shutil
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megacp.checkpointing import distributed, folder
from megacp.checkpointing.distributed import CheckpointError, latest_iteration, load_checkpoint, save_checkpoint
from tests.distributed import run_distributed
from tests.training.sharded_model import adamw, full_moments, full_weights, sharded_model, train_step


def train(rank, world_size, directory, first, last, save):
    """Steps `first` to `last` - 1, from the checkpoint unless `first` is 0; the state after them and the norms seen."""
    model = sharded_model(seed=first)  # other weights than those saved, lest loading nothing looks right
    optimizer = adamw(model)
    if first:
        expected = {"iteration": first, "consumed_samples": 8 * first, "args": {"lr": 0.1, "split": [9, 1]}}
        assert load_checkpoint(directory, model, optimizer) == expected
    norms = [train_step(model, optimizer, step) for step in range(first, last)]
    if save:
        trainer_state = {"iteration": last, "consumed_samples": 8 * last, "args": {"lr": 0.1, "split": (9, 1)}}
        save_checkpoint(directory, last, model, optimizer, trainer_state)
    return norms, full_weights(model) | full_moments(model, optimizer)


def assert_equal_states(state, expected):
    assert state.keys() == expected.keys()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name


def test_a_run_resumed_twice_is_the_uninterrupted_run_bit_by_bit(tmp_path):
    straight_norms, straight = run_distributed(train, 2, tmp_path, 0, 8, False)[0]
    first_norms, _ = run_distributed(train, 2, tmp_path, 0, 3, True)[0]
    second_norms, _ = run_distributed(train, 2, tmp_path, 3, 5, True)[0]
    third_norms, resumed = run_distributed(train, 2, tmp_path, 5, 8, False)[0]
    assert first_norms + second_norms + third_norms == straight_norms
    assert_equal_states(resumed, straight)


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 1)])
def test_loading_on_another_number_of_ranks(tmp_path, saving, loading):
    _, saved = run_distributed(train, saving, tmp_path, 0, 2, True)[0]
    for _, loaded in run_distributed(train, loading, tmp_path, 2, 2, False):
        assert_equal_states(loaded, saved)


def settings_after_load(rank, world_size, directory):
    model = sharded_model()
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    save_checkpoint(directory, 1, model, optimizer, {})
    model = sharded_model(seed=1)
    optimizer = adamw(model, lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
    load_checkpoint(directory, model, optimizer)
    names = ("lr", "weight_decay", "betas", "fused")
    return [tuple(group[name] for name in names) for group in optimizer.param_groups]


def test_flags_not_the_checkpoint_give_the_optimizers_settings(tmp_path):
    expected = [(0.5, 0.3, (0.8, 0.9), True), (0.5, 0.0, (0.8, 0.9), True)]
    assert run_distributed(settings_after_load, 2, tmp_path) == [expected] * 2


def save_before_the_first_step(rank, world_size, directory):
    model = sharded_model()
    optimizer = adamw(model)
    before = full_weights(model)
    save_checkpoint(directory, 0, model, optimizer, {})
    assert_equal_states(full_weights(model), before)
    loaded = sharded_model(seed=1)
    loaded_optimizer = adamw(loaded)
    load_checkpoint(directory, loaded, loaded_optimizer)
    untouched = sharded_model()
    untouched_optimizer = adamw(untouched)
    states = []
    for pair in ((model, optimizer), (loaded, loaded_optimizer), (untouched, untouched_optimizer)):
        train_step(*pair, 0)
        states.append(full_weights(pair[0]) | full_moments(*pair))
    return states


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    saver, loaded, untouched = run_distributed(save_before_the_first_step, 2, tmp_path)[0]
    assert_equal_states(saver, untouched)
    assert_equal_states(loaded, untouched)


def draw():
    return random.random(), np.random.random(), torch.rand(()).item()


def draws_after_save(rank, world_size, directory):
    torch.manual_seed(42 + rank)
    np.random.seed(42 + rank)
    random.seed(42 + rank)
    draw()
    model = sharded_model()
    optimizer = adamw(model)
    save_checkpoint(directory, 7, model, optimizer, {})
    return draw()


def draws_after_load(rank, world_size, directory):
    model = sharded_model()
    draws = set()
    for _ in range(2):  # the same at every attempt
        load_checkpoint(directory, model, adamw(model))
        draws.add(draw())
    [numbers] = draws
    return numbers


def test_random_generators(tmp_path):
    saved = run_distributed(draws_after_save, 2, tmp_path)
    assert run_distributed(draws_after_load, 2, tmp_path) == saved  # each rank goes on in its own stream
    other_layout = run_distributed(draws_after_load, 3, tmp_path)
    for kind in range(3):
        numbers = [draws[kind] for draws in saved + other_layout]
        assert len(set(numbers)) == 5  # no two ranks alike


def draws_after_loading_the_rest(rank, world_size, directory):
    """As many ranks as saved: what a load restores unless told not to."""
    model = sharded_model()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    load_checkpoint(directory, model, None, generators=False)
    return draw()


def test_random_generators_can_be_left_alone(tmp_path):
    run_distributed(draws_after_save, 2, tmp_path)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert run_distributed(draws_after_loading_the_rest, 2, tmp_path) == [draw()] * 2


def weights_alone(rank, world_size, directory):
    model = sharded_model()
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    save_checkpoint(directory, 1, model, optimizer, {"iteration": 1})
    loaded = sharded_model(seed=1)
    assert load_checkpoint(directory, loaded, None) == {"iteration": 1}
    return full_weights(model), full_weights(loaded)


def test_weights_can_be_loaded_without_an_optimizer(tmp_path):
    saved, loaded = run_distributed(weights_alone, 2, tmp_path)[0]
    assert_equal_states(loaded, saved)


def load_messages(rank, world_size, directories, iteration=None, **model_changes):
    """The message of each failing load, and whether the model stayed as it was."""
    messages = []
    for directory in directories:
        model = sharded_model(seed=1, **model_changes)
        before = full_weights(model)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(directory, model, adamw(model), iteration)
        assert_equal_states(full_weights(model), before)
        messages.append(str(error.value))
    return messages


def load_messages_of_changed_models(rank, world_size, directory):
    return [
        load_messages(rank, world_size, [directory], **changes)[0]
        for changes in ({"hidden": 16}, {"num_layers": 3}, {"num_layers": 1}, {"qk_layernorm": True}, {"width": 6})
    ]


def save_twice(rank, world_size, directory, sgd=False):
    model = sharded_model()
    optimizer = adamw(model)
    for iteration in (10, 20):
        train_step(model, optimizer, iteration)
        last = torch.optim.SGD(model.parameters(), lr=0.1) if sgd and iteration == 20 else optimizer
        save_checkpoint(directory, iteration, model, last, {"iteration": iteration})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Iterations 10 and 20 of two ranks; tests change a copy."""
    directory = tmp_path_factory.mktemp("saved")
    run_distributed(save_twice, 2, directory)
    return directory


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


DAMAGES = [
    ("__0_0.distcp", truncate, "bytes where"),
    ("__0_0.distcp", flip_a_bit, "is damaged"),
    ("__1_0.distcp", flip_a_bit, "is damaged"),
    ("__1_0.distcp", lambda path: path.unlink(), "cannot be read"),
    (".metadata", truncate, "bytes where"),
    (".metadata", flip_a_bit, "is damaged"),
    (".metadata", lambda path: path.unlink(), "cannot be read"),
    ("trainer_state.json", lambda path: path.write_text(path.read_text().replace("20", "21")), "is damaged"),
    ("trainer_state.json", lambda path: path.unlink(), "cannot be read"),
    ("manifest.json", flip_a_bit, "is damaged"),
    ("manifest.json", truncate, "is damaged"),
]


def test_damaged_checkpoints_are_refused_on_every_rank_and_the_older_one_is_named(saved, tmp_path):
    directories = []
    for number, (name, damage, _) in enumerate(DAMAGES):
        directories.append(tmp_path / f"damaged{number}")
        shutil.copytree(saved, directories[-1])
        damage(directories[-1] / "iter_0000020" / name)
    for messages in run_distributed(load_messages, 2, directories):
        for directory, message, (name, _, what) in zip(directories, messages, DAMAGES, strict=True):
            assert message.startswith(f"--load {directory}: iter_0000020: {name} ") and what in message
            assert message.endswith("iter_0000010 is older and intact: --ckpt-step 10 takes it, or move iter_0000020 away")


def load_in_turn(rank, world_size, choices):
    model = sharded_model()
    return [load_checkpoint(directory, model, adamw(model), iteration) for directory, iteration in choices]


def test_choosing_an_iteration_and_moving_a_damaged_one_away_as_advised(saved, tmp_path):
    moved = shutil.copytree(saved, tmp_path / "moved")
    shutil.move(moved / "iter_0000020", tmp_path)
    for states in run_distributed(load_in_turn, 2, [(saved, None), (saved, 10), (moved, None)]):
        assert states == [{"iteration": 20}, {"iteration": 10}, {"iteration": 10}]


def absent_messages(rank, world_size, directories, iteration):
    return load_messages(rank, world_size, directories), load_messages(rank, world_size, directories[-1:], iteration)[0]


def test_no_such_checkpoint_and_no_sound_one_to_name(saved, tmp_path):
    both_damaged = shutil.copytree(saved, tmp_path / "both")
    flip_a_bit(both_damaged / "iter_0000020" / "__0_0.distcp")
    truncate(both_damaged / "iter_0000010" / "__0_0.distcp")
    empty = tmp_path / "empty"
    empty.mkdir()
    directories = [empty, tmp_path / "absent", both_damaged]
    for messages, other_iteration in run_distributed(absent_messages, 2, directories, 15):
        for directory, message in zip(directories[:2], messages[:2], strict=True):
            assert message == f"--load {directory}: there is no complete checkpoint in it"
        assert "iter_0000020: __0_0.distcp is damaged" in messages[2] and "iter_0000010" not in messages[2]
        assert "no complete checkpoint of iteration 15; there are [10, 20]" in other_iteration


def test_another_model_is_refused_with_names_shapes_and_flags(saved):
    for messages in run_distributed(load_messages_of_changed_models, 2, saved):
        hidden, three_layers, one_layer, qk, width = messages
        assert "layers.0.up_proj is (24, 7) in the checkpoint and (16, 7)" in hidden and "--ffn-hidden-size" in hidden
        assert "layers.2.input_layernorm" in three_layers and "--num-layers (2 saved, 3 asked for)" in three_layers
        assert "layers.1.input_layernorm" in one_layer and "--num-layers (2 saved, 1 asked for)" in one_layer
        assert "layers.0.q_norm" in qk and "--qk-layernorm" in qk
        assert "norm is (7,) in the checkpoint and (6,)" in width and "--hidden-size" in width
        assert all(f"--load {saved}: iter_0000020" in message for message in messages)


def weights_of(rank, world_size, directory):
    return load_checkpoint(directory, sharded_model(), None)


def test_missing_optimizer_state(tmp_path):
    run_distributed(save_twice, 2, tmp_path, True)
    [message], _ = run_distributed(load_messages, 2, [tmp_path])
    assert "iter_0000020: .metadata has no optimizer state" in message and "iter_0000010 is older and intact" in message
    assert "--no-load-optim takes them" in message and run_distributed(weights_of, 2, tmp_path) == [{"iteration": 20}] * 2


def save_with_a_slow_rank(rank, world_size, directory):
    """The default group gives up after 0.3 s, as NCCL does after minutes."""
    model = sharded_model()
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
    record_file = folder.record_file
    folder.record_file = lambda path: (time.sleep(rank), record_file(path))[1]
    save_checkpoint(directory, 1, model, optimizer, {})
    folder.record_file = record_file
    with pytest.raises(RuntimeError):  # the 0.3 s are in force
        time.sleep(rank)
        dist.all_reduce(torch.ones(1))


def test_a_save_slower_than_the_groups_timeout(tmp_path):
    run_distributed(save_with_a_slow_rank, 2, tmp_path)
    assert latest_iteration(tmp_path) == 1


def test_files_are_spread_over_the_ranks_for_verification(tmp_path, monkeypatch):
    manifest = folder.Manifest(1, 4, {f"__{n}_0.distcp": folder.FileRecord(100 + n % 2, "0") for n in range(10)})
    verified = []
    monkeypatch.setattr(folder, "verify_file", lambda path, record: verified[-1].append(path.name))
    for rank in range(3):
        verified.append([])
        distributed._verify_files(tmp_path, manifest, rank, 3)
    assert sorted(name for share in verified for name in share) == sorted(manifest.files)
    assert {len(share) for share in verified} == {3, 4}


def test_the_manifest_lists_every_file(saved):
    text = (saved / "iter_0000020" / folder.MANIFEST).read_text()
    fields = json.loads(text.partition("\n")[2])
    assert (fields["iteration"], fields["world_size"]) == (20, 2)
    on_disk = {path.name: path.stat().st_size for path in (saved / "iter_0000020").iterdir()}
    recorded = {name: record["bytes"] for name, record in fields["files"].items()}
    assert recorded | {folder.MANIFEST: len(text)} == on_disk
