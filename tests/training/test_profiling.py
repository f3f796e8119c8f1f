"""A profiler leaves nothing behind in the run; whole profiled runs are in test_watchers.py."""

import pytest
import torch

from megacp.context_parallel import engine
from megacp.memory.copies import Copies
from megacp.model import attention_projections, decoder_layer, output_head
from megacp.model.attention_projections import AttentionProjections
from megacp.model.config import preset
from megacp.model.llama import Llama
from megacp.training import step as training_step
from megacp.training.profiling import StepProfiler, named_ranges
from megacp.training.wrapping import wrapped


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with torch.device("meta"):
        model = Llama(preset("llama-tiny"))
    optimizer = torch.optim.AdamW(model.parameters())
    with StepProfiler(1, 2, str(tmp_path / "file"), 5, model, optimizer, torch.device("cpu")) as profiler:
        profiler.start_step(1, [])
        profiler.finish_step()
    assert "warning: the profile of steps 1-1, rank 5, could not be written" in capsys.readouterr().out


@pytest.mark.parametrize("steps, said", [([1, 2], "ended with step 2"), ([], "trained nothing")])
def test_a_run_that_does_not_meet_the_steps_to_profile_says_so(tmp_path, capsys, steps, said):
    with StepProfiler(10, 12, str(tmp_path), 0, None, None, torch.device("cpu")) as profiler:
        for step in steps:
            profiler.start_step(step, [])
            profiler.finish_step()
    assert f"warning: no profile: the run {said}, and --profile-step-start was 10" in capsys.readouterr().out


def test_a_run_that_goes_on_after_the_steps_to_profile_says_so_at_once(tmp_path, capsys):
    with StepProfiler(10, 12, str(tmp_path), 0, None, None, torch.device("cpu")) as profiler:
        for step in (81, 82):
            profiler.start_step(step, [])
            profiler.finish_step()
            said = capsys.readouterr().out
            assert ("the run goes on with step 81, and --profile-step-end is 12; --profile-step-start 82" in said) == (step == 81)
    assert not capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_run_that_ends_in_the_warm_up_has_no_trace(tmp_path, capsys):
    with torch.device("meta"):
        model = Llama(preset("llama-tiny"))
    optimizer = torch.optim.AdamW(model.parameters())
    with StepProfiler(10, 12, str(tmp_path), 0, model, optimizer, torch.device("cpu")) as profiler:
        for step in (8, 9):
            profiler.start_step(step, [])
            profiler.finish_step()
    assert "warning: no profile: the run ended with step 9, and --profile-step-start was 10" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_outside_a_profile_functions_and_hooks_are_as_they_were():
    with torch.device("meta"):
        model = Llama(preset("llama-tiny"))
    optimizer = torch.optim.AdamW(model.parameters())
    places = [(torch.Tensor, "backward"), (AttentionProjections, "pack_q"), (AttentionProjections, "take_dkv"),
              (attention_projections, "read_ahead"), (decoder_layer, "read_ahead"), (output_head, "tiles"), (engine, "all_to_all"),
              (engine, "attention_backward"), (decoder_layer, "_mlp_forward"), (Copies, "to_host"),
              (training_step, "clip_grad_norm"), (optimizer, "step")]  # fmt: skip
    before = [getattr(*place) for place in places]
    own = dict(vars(optimizer))
    with named_ranges(model, optimizer):
        assert all(getattr(*place) != function for place, function in zip(places, before))
    assert [getattr(*place) for place in places] == before and vars(optimizer) == own
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_wrapping_ends_with_the_block_however_it_ends():
    class Owner:
        def name(self):
            return 1

    owner, original = Owner(), Owner.name
    targets = [(Owner, "name", lambda f: lambda self: f(self) + 1), (owner, "name", lambda f: lambda: f() * 10),
               (owner, "name", lambda f: lambda: f() + 5)]  # fmt: skip
    with pytest.raises(KeyError), wrapped(targets):
        assert owner.name() == 25 and Owner().name() == 2
        raise KeyError
    assert owner.name() == 1 and vars(owner) == {} and Owner.name is original
    with pytest.raises(AttributeError), wrapped([targets[0], (owner, "absent", lambda f: f)]):
        pytest.fail("the block ran")
    assert Owner.name is original
