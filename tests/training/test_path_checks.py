"""A run that would lose a checkpoint, or find after hours that it cannot write one, does not start."""

import argparse
import os
import re

import pytest

from megacp.argument_checks import ArgumentError
from megacp.checkpointing.folder import INCOMPLETE, Manifest, begin, publish
from megacp.training import path_checks
from megacp.training.path_checks import abandoned_steps, begin_from_pretrained, check_logs, check_paths, place_to_resume

FILES = ("log_jsonl", "heartbeat_file", "rehearse_json", "record_memory_history")
LOGS = ("tensorboard_dir", "profile_dir", *FILES)


def flags(**given):
    names = ("save", "load", "load_hf", *LOGS)
    paths = {name: None if given.get(name) is None else str(given[name]) for name in names}
    return argparse.Namespace(**{"finetune": False, "no_load_optim": False, "ckpt_step": None, "pretrained_checkpoint": None} | given | paths)


def save(directory, iteration):
    begin(directory, iteration)
    return publish(directory, Manifest(iteration, 1, {}))


def refusal(check, **given):
    with pytest.raises(ArgumentError) as error:
        check(flags(**given))
    return str(error.value)


def contents(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*"))


@pytest.fixture
def ckpt(tmp_path):
    directory = tmp_path / "ckpt"
    for iteration in (10, 20):
        save(directory, iteration)
    return directory


def test_checkpoints_of_another_run_are_not_saved_over(ckpt, tmp_path):
    (tmp_path / "ckpt-2").mkdir()
    before = contents(tmp_path)
    for load in (None, save(tmp_path / "other", 3).parent):
        message = refusal(check_paths, save=ckpt, load=load)
        assert f"--save {ckpt} holds checkpoints up to step 20" in message
        check_paths(flags(save=ckpt, load=re.search(r"--load (\S+) goes on", message)[1]))
        advised = re.search(r"works too: --save (\S+)", message)[1]
        assert advised == f"{ckpt}-3", "a folder that is there may hold something"
        check_paths(flags(save=advised, load=load))
    assert set(before) <= set(contents(tmp_path))


def test_the_same_folder_under_another_name_is_the_same(ckpt, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(ckpt)
    monkeypatch.chdir(tmp_path)
    for load in (tmp_path / "link", "ckpt", "./x/../ckpt/"):
        check_paths(flags(save=ckpt, load=load))


def test_a_first_run_starts_and_what_a_killed_first_save_left_is_no_checkpoint(tmp_path):
    check_paths(flags())
    check_paths(flags(save=tmp_path / "a" / "b", load=tmp_path / "a" / "b"))
    begin(tmp_path / "killed", 10)
    assert list((tmp_path / "killed").glob(f"*{INCOMPLETE}"))
    check_paths(flags(save=tmp_path / "killed"))
    check_paths(flags(save=tmp_path / "killed", load=tmp_path / "killed"))
    assert not (tmp_path / "a").exists(), "looking makes nothing"


def test_a_single_checkpoint_given_to_load_would_start_from_nothing(ckpt):
    message = refusal(check_paths, load=ckpt / "iter_0000010")
    assert f"--load {ckpt / 'iter_0000010'} is a single checkpoint" in message and f"--load {ckpt} " in message
    check_paths(flags(load=ckpt, ckpt_step=int(re.search(r"--ckpt-step (\d+)", message)[1])))


def test_the_steps_that_can_be_chosen_are_listed(ckpt, tmp_path):
    for step in (10, 20):
        check_paths(flags(load=ckpt, save=ckpt, ckpt_step=step))
    message = refusal(check_paths, load=ckpt, ckpt_step=15)
    assert message == f"--ckpt-step 15: --load {ckpt} holds no checkpoint of this step; those of 10, 20 are there, and without --ckpt-step that of 20 is taken"
    for empty in ({"load_hf": tmp_path}, {"save": tmp_path / "none"}):  # enough to start without a checkpoint
        message = refusal(check_paths, load=tmp_path / "none", ckpt_step=0, **empty)
        assert message.startswith(f"--load {tmp_path / 'none'} does not exist, and --ckpt-step 0 starts from one")


def test_checkpoints_saved_after_the_chosen_one_are_known(ckpt, tmp_path):
    save(ckpt, 15)  # of a run that had gone back to step 10 before
    for step, later in ((10, [20, 15]), (20, [15]), (15, [])):
        assert abandoned_steps(flags(load=ckpt, save=ckpt, ckpt_step=step)) == later
    for other in ({"save": tmp_path / "new", "ckpt_step": 10}, {"ckpt_step": 10}, {"save": ckpt}):
        assert abandoned_steps(flags(load=ckpt, **other)) == []


def test_finetuning_has_weights_to_start_from_and_a_folder_of_its_own(ckpt, tmp_path):
    check_paths(flags(load=ckpt, finetune=True))
    (tmp_path / "link").symlink_to(ckpt)
    for same in (ckpt, tmp_path / "link"):
        message = refusal(check_paths, load=ckpt, save=same, finetune=True)
        assert message.startswith(f"--save {same} is the folder of --load: with --finetune this run starts at step 0")
        check_paths(flags(load=ckpt, save=re.search(r"works: --save (\S+)$", message)[1], finetune=True))
    for other in ({"save": tmp_path / "none"}, {"save": tmp_path / "new", "load_hf": tmp_path}):
        message = refusal(check_paths, load=tmp_path / "none", finetune=True, **other)
        assert "none does not exist, and --finetune starts from one" in message
    check_paths(flags(load=ckpt, save=tmp_path / "new", finetune=True))


def test_a_pretrained_checkpoint_is_where_a_run_starts_until_it_has_saved(ckpt, tmp_path):
    first = flags(pretrained_checkpoint=str(ckpt), load=tmp_path / "own", save=tmp_path / "own")
    begin_from_pretrained(first)
    check_paths(first)
    assert first.load == str(ckpt) and first.finetune and place_to_resume(first) == str(tmp_path / "own")
    save(tmp_path / "own", 3)
    later = flags(pretrained_checkpoint=str(tmp_path / "gone"), load=tmp_path / "own", save=tmp_path / "own")
    begin_from_pretrained(later)
    assert later.load == str(tmp_path / "own") and not later.finetune


def test_one_checkpoint_of_several_may_be_the_start(tmp_path):
    folder = tmp_path / "several"
    older = save(folder, 10)
    save(folder, 20)
    first = flags(pretrained_checkpoint=str(older), load=tmp_path / "own", save=tmp_path / "own")
    begin_from_pretrained(first)
    check_paths(first)
    assert (first.load, first.ckpt_step, place_to_resume(first)) == (str(folder), 10, str(tmp_path / "own"))


def test_a_pretrained_checkpoint_that_is_none_or_could_not_be_queued_again(ckpt, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    new = tmp_path / "new"
    for given, others, said in (
        (tmp_path / "none", {}, "does not exist; a folder that --save wrote works"),
        (tmp_path / "hf", {}, f"--load-hf {tmp_path / 'hf'} works"),
        (ckpt, {"save": new}, f"needs --load {new}"),
        (ckpt, {"save": new, "load": tmp_path / "other"}, f"needs --load {new}"),
        (ckpt, {"load": ckpt, "save": ckpt}, f"--load {ckpt}-2 --save {ckpt}-2 works"),
        (ckpt, {"load": ckpt}, "is also --load"),
    ):
        message = refusal(begin_from_pretrained, pretrained_checkpoint=str(given), **others)
        assert message.startswith(f"--pretrained-checkpoint {given} ") and said in message, message


def test_a_finetuning_run_that_has_saved_is_told_how_to_go_on(ckpt, tmp_path):
    own = save(tmp_path / "own", 3).parent
    message = refusal(check_paths, load=ckpt, save=own, finetune=True)
    assert f"--load {own} without --finetune goes on from there" in message
    check_paths(flags(load=own, save=own))
    assert place_to_resume(flags(save=own, load=own)) == str(own) and place_to_resume(flags()) is None
    once = flags(save=own, load=own, no_load_optim=True, ckpt_step=3)
    assert place_to_resume(once) == f"{own} without --no-load-optim and --ckpt-step"


@pytest.mark.parametrize("kind", ["does not exist", "holds no checkpoint", "is a file"])
def test_a_load_that_nothing_will_ever_be_saved_in_is_a_slip(tmp_path, kind):
    load = tmp_path / "typo"
    if kind == "is a file":
        load.write_text("")
    elif kind == "holds no checkpoint":
        load.mkdir()
    for other in (None, tmp_path / "elsewhere"):
        message = refusal(check_paths, load=load, save=other)
        assert f"--load {load} {kind}" in message
    check_paths(flags(save=other))  # as advised: without --load
    if kind != "is a file":
        assert f"--save {load}" in message
        check_paths(flags(load=load, save=load))
        check_paths(flags(load=load, save=other, load_hf=tmp_path))  # --load-hf gives the first weights


def test_a_hugging_face_folder_given_to_load(tmp_path):
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        assert f"--load-hf {folder} works" in refusal(check_paths, load=folder, save=folder)


PLACES = [("save", check_paths)]
PLACES += [(name, check_logs) for name in LOGS]


@pytest.mark.parametrize("flag, check", PLACES)
def test_places_that_cannot_be_written_are_named_before_the_run(tmp_path, monkeypatch, flag, check):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    real = os.access
    monkeypatch.setattr(path_checks.os, "access", lambda path, mode: "locked" not in str(path) and real(path, mode))  # also for root
    name = "--" + flag.replace("_", "-")
    for place, reason in (("file/x", "is a file"), ("locked/a/x", "no file can be made in"), ("locked/x", "no file can be made in")):
        message = refusal(check, **{flag: tmp_path / place})
        assert message.startswith(f"{name} {tmp_path / place}") and reason in message
    check(flags(**{flag: tmp_path / "new" / "x"}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_folder_or_is_not_ours(tmp_path, monkeypatch, name):
    flag = "--" + name.replace("_", "-")
    message = refusal(check_logs, **{name: tmp_path})
    check_logs(flags(**{name: re.search(rf"{flag} (\S+)$", message)[1]}))
    (tmp_path / "log").write_text("")
    check_logs(flags(**{name: tmp_path / "log"}))
    monkeypatch.setattr(path_checks.os, "access", lambda path, mode: not str(path).endswith("log"))
    assert "cannot be written" in refusal(check_logs, **{name: tmp_path / "log"})


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder whose permissions promise what it does not keep")
@pytest.mark.parametrize("flag, check", PLACES)
def test_a_place_that_looks_writable_and_takes_no_file(flag, check):
    message = refusal(check, **{flag: "/proc/profiles/x"})
    assert message.startswith("--" + flag.replace("_", "-") + " /proc/profiles/x") and "no file can be made in /proc" in message


def test_what_is_not_saved_by_this_program_is_seen_before_the_step_of_its_name(ckpt, tmp_path):
    (ckpt / "iter_0000030").mkdir()
    (ckpt / "iter_0000040.incomplete").mkdir()  # a killed save's, which the next removes
    for load in (None, ckpt):
        message = refusal(check_paths, save=ckpt, load=load)
        assert message.startswith(f"--save {ckpt} holds iter_0000030, but not as this program saves it")
        check_paths(flags(save=re.search(r"own: --save (\S+)", message)[1], load=load))
    (ckpt / "iter_0000030").rmdir()
    check_paths(flags(save=ckpt, load=ckpt))
    megatron = tmp_path / "megatron"
    megatron.mkdir()
    (megatron / "latest_checkpointed_iteration.txt").write_text("release")
    assert f"--save {megatron} holds latest_checkpointed_iteration.txt, but not as" in refusal(check_paths, save=megatron)
    (megatron / "latest_checkpointed_iteration.txt").unlink()
    check_paths(flags(save=megatron))


def test_a_phase_whose_folder_another_run_filled_meanwhile_is_told_to_start_again(ckpt, tmp_path):
    own = flags(pretrained_checkpoint=str(ckpt), load=tmp_path / "own", save=tmp_path / "own")
    begin_from_pretrained(own)
    check_paths(own)
    save(tmp_path / "own", 7)
    with pytest.raises(ArgumentError, match=f"--save {tmp_path / 'own'}: meanwhile another run saved checkpoints up to step 7 there; the same"):
        check_paths(own)
    again = flags(pretrained_checkpoint=str(ckpt), load=tmp_path / "own", save=tmp_path / "own")
    begin_from_pretrained(again)
    check_paths(again)
