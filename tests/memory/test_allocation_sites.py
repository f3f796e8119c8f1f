"""Names of results and places of allocations, on a file written for it."""

import sys

import pytest
import torch

from megacp.memory import allocation_sites
from megacp.memory.counting import AllocationCounter

SOURCE = '''
class Holder: pass
def frame(): return sys._getframe(1)
def run(seen):
    q_XnD = seen(
        frame())
    dk_SmD, (dv_SmD, h_out_Td) = seen(frame()), (1, 2)
    holder = Holder()
    holder.dxn_Td = seen(frame())
    sums = {}
    sums[seen(frame())] = 1
    kv_grads: list = [seen(frame())]
    for start, x_td in [(0, seen(frame()))]:
        y = [
            seen(frame()) for _ in "a"
        ]
    holder.put = seen
    holder.put(frame())
    return seen(frame())
'''
EXPECTED = ["q", "dk, dv, h_out", "holder.dxn", "sums", "kv_grads", "start, x", "y", "holder.put", ""]


def test_results_are_named_by_their_statements(tmp_path):
    file = tmp_path / "written.py"
    file.write_text(SOURCE)
    names, space = [], {"sys": sys}
    exec(compile(SOURCE, str(file), "exec"), space)
    space["run"](lambda frame: names.append(allocation_sites.result_name(frame)) or len(names))
    assert names == [name.replace("holder.dxn", "dxn") for name in EXPECTED]


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_counter_asks_for_names_and_renames_what_lives(name):
    with AllocationCounter(name=lambda frame: name) as counter:
        x = torch.empty(256)
        assert counter.peak_holders() == {name: 1024}
        counter.rename_live("kept")
        counter.reset_peak()
        y = torch.empty(512)
        assert counter.peak_holders() == {name: 2048, "kept": 1024}
        del x, y
