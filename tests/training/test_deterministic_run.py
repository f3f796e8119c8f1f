"""--deterministic in a whole run: attention is selected and called so, torch's other kernels are held to it, and bits repeat."""

from tests.distributed import run_distributed
from tests.test_pretrain import MODEL, _main_with_own_group, numbers

FLAGS = [*MODEL, "--mock-data", "--context-parallel-size", 2, "--upipe-query-chunk", 32, "--mlp-tile-size", 32, "--train-iters", 3,
         "--deterministic"]  # fmt: skip


def _noting_main(rank, world_size, flags):
    import torch

    from megacp.context_parallel import engine
    from megacp.training import step

    selected, called = [], []
    select_backend, attention_backward = step.select_backend, engine.attention_backward

    def select(*args, **settings):
        selected.append(settings["deterministic"])
        return select_backend(*args, **settings)

    def backward(*args):
        if args[0].device.type != "meta":  # the planner counts a layer there
            called.append((args[9], torch.are_deterministic_algorithms_enabled()))
        return attention_backward(*args)

    step.select_backend, engine.attention_backward = select, backward
    _main_with_own_group(rank, world_size, flags)
    assert set(selected) == {True} and set(called) == {(True, True)}


def test_a_deterministic_run_is_so_throughout_and_repeats(tmp_path):
    def steps(name):
        run_distributed(_noting_main, 2, [str(flag) for flag in (*FLAGS, "--log-jsonl", tmp_path / name)])
        return numbers(tmp_path / name)

    first = steps("first.jsonl")
    assert len(first) == 3 and steps("second.jsonl") == first
