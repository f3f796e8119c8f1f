"""The whole tool on gloo ranks; what it writes is what plan_memory.py --calibrate reads."""

import doctest
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacp.benchmark.collectives import Timing
from megacp.training.speeds import read_all_to_all
from tests.distributed import run_distributed
from tests.tools.loading import load_tool

TOOL = Path(__file__).parents[2] / "tools" / "measure_all_to_all.py"


def tool():
    return load_tool(TOOL)


def ranks_main(rank, world_size, flags):
    """The tool makes a default group of its own, on the store of the one that the test brings."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    original = dist.init_process_group

    def with_store(backend, timeout):
        return original(backend, store=dist.PrefixStore("tool", store), rank=rank, world_size=world_size)

    dist.init_process_group = with_store
    return tool().main(flags)


def memory_refusal(rank, world_size):
    with pytest.raises(ValueError) as caught:
        tool()._check_memory(9000 * 2**30, torch.device("cpu"))
    return str(caught.value)


def test_all_collectives_by_size_and_group_and_the_planner_reads_them(tmp_path):
    file = tmp_path / "all_to_all.json"
    flags = ["--device", "cpu", "--sizes", "4K", "1M", "--gpus", "2", "4", "--repeats", "3", "--output", str(file)]
    assert run_distributed(ranks_main, 4, flags) == [0] * 4
    written = json.loads(file.read_text())
    for name in ("all_to_all", "all_gather", "reduce_scatter"):
        measured = [(entry["bytes_per_rank"], entry["gpus"]) for entry in written[name]]
        assert measured == [(2**12, 2), (2**20, 2), (2**12, 4), (2**20, 4)]
    curves = read_all_to_all(str(file))
    entry = next(entry for entry in written["all_to_all"] if entry["gpus"] == 4 and entry["bytes_per_rank"] == 2**20)
    assert set(curves) == {2, 4} and curves[4][1] == (2**20, 2**20 / entry["seconds"])
    assert "cores" in written["environment"]["device"] and written["device"] == "cpu"


def test_bus_bandwidth_counts_what_goes_to_others():
    assert Timing(8_000_000_000, 2.0, 4).bus_bytes_per_s == 3e9
    assert tool().row("all_to_all", Timing(2**28, 0.001, 2)).split() == ["all_to_all", "2", "256.00", "1000.0", "134.22"]


@pytest.mark.parametrize(
    "ranks, flags, said",
    [
        ("1", [], "nproc-per-node 2 works"), ("6", ["--gpus", "4"], "2 or 3 or 6 works"),
        ("2", ["--output", f"{Path(__file__)}/all.json"], "is a file, not a folder"),
        ("2", ["--output", f"{Path(__file__).parent}"], "a file in it works"),
        ("2", ["--output", "/proc/none/all.json"], "works"),
        ("2", ["--output", f"{Path(__file__).parent}/{'n' * 300}.json"], "all_to_all.json works"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(ranks, flags, said, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("RANK", "0")
    assert tool().main(flags) == 2 and said in capsys.readouterr().err


def test_no_size_is_empty_or_measured_twice_and_one_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "new" / "all_to_all.json"
    flags = ["--device", "cpu", "--sizes", "3", "1", "4097", "4K", "4096", "--repeats", "1"]
    flags += ["--collectives", "all_to_all", "all_to_all"]
    assert run_distributed(ranks_main, 2, [*flags, "--gpus", "2", "2", "--output", str(file)]) == [0] * 2
    assert [entry["bytes_per_rank"] for entry in json.loads(file.read_text())["all_to_all"]] == [4, 4096]
    assert set(read_all_to_all(str(file))) == {2}
    kept = file.read_text()
    assert run_distributed(ranks_main, 2, ["--device", "cpu", "--sizes", "4K", "9000G", "--output", str(file)]) == [2] * 2
    assert file.read_text() == kept
    for said in run_distributed(memory_refusal, 2):
        assert "--sizes: 9000.00 GiB do not fit" in said
        assert 2**20 <= tool().byte_count(said.partition("free for a rank; ")[2].split()[0]) < 2**42


def test_sizes_are_read():
    assert doctest.testmod(tool()).failed == 0
    module = tool()
    assert [module.byte_count(text) for text in ("3", "256K", "1g")] == [3, 2**18, 2**30]
    for text in ("0", "1T", "x"):
        with pytest.raises(module.argparse.ArgumentTypeError, match="256K"):
            module.byte_count(text)
