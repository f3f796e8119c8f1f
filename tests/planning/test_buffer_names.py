"""The table of names is that of the code: each place allocates in some job, and no buffer at a peak goes without a name."""

from dataclasses import replace

import torch

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.rotary import inverse_frequencies
from megacp.memory.counting import AllocationCounter
from megacp.memory.policy import GPU, HOST, PLANS, RECOMPUTE, LayerPlan
from megacp.model.config import preset
from megacp.planner import META, Job, run_head, run_layer
from megacp.planning import buffer_names
from megacp.planning.work import WorkCounter

CONFIG = replace(preset("llama-tiny"), num_layers=1, qk_layernorm=True)
WIDE = replace(CONFIG, kv_channels=128)
REMADE = LayerPlan(output=RECOMPUTE, lse=RECOMPUTE)


def job_of(tokens=512, ranks=2, heads_per_stage=4, config=CONFIG, **changes):
    fields = dict(tokens=tokens, sharding_ranks=ranks, tile_size=128, loss_tile_size=128, dtype=torch.bfloat16)
    return Job(config, build_head_schedule(8, 4, ranks, heads_per_stage), **(fields | changes))


def cases():
    plans = [PLANS["gpu"], PLANS["lean"], REMADE, LayerPlan(products=True), LayerPlan(HOST, GPU, GPU, prefetch=True)]
    jobs = [job_of(), job_of(ranks=8, heads_per_stage=8), job_of(query_chunk=256), job_of(sequences=4, dtype=torch.float32),
            job_of(ranks=1, heads_per_stage=4)]  # fmt: skip
    yield from ((job, plan) for job in jobs for plan in plans)
    # Streams that are cut for the kernel: into heads, into documents.
    yield job_of(2**22, 2, 8, WIDE, tile_size=2**20), PLANS["lean"]
    yield job_of(2**22, 2, 8, WIDE, tile_size=2**20, sequences=2), LayerPlan()


class Table(dict):
    """Notes which places were found in it."""

    def __init__(self, file, places, found):
        super().__init__(places)
        self.file, self.found = file, found

    def get(self, place, default=None):
        if place in self:
            self.found.add((self.file, *place))
        return super().get(place, default)


def test_every_place_allocates_and_every_buffer_at_a_peak_has_a_name(monkeypatch):
    found = set()
    tables = {file: Table(file, places, found) for file, places in buffer_names._PLACES.items()}
    monkeypatch.setattr(buffer_names, "_PLACES", tables)
    buffer_names._places_of.cache_clear()
    names = {name for places in tables.values() for name in places.values()} | {buffer_names.KEPT}
    for job, plan in cases():
        layer = run_layer(job, plan)
        assert layer.forward_parts.keys() | layer.backward_parts.keys() <= names, (job, plan)
    assert run_head(job_of()).parts.keys() <= names
    buffer_names._places_of.cache_clear()
    assert found == {(file, *place) for file, places in tables.items() for place in places}


def test_no_weight_gradient_is_copied_when_it_leaves():
    """A job so short that its peak would be there. Training keeps them fp32 up to the reduction, which is counted by itself."""
    config = replace(preset("llama3-8b"), num_layers=1)
    job = replace(job_of(tokens=64), config=config, schedule=build_head_schedule(32, 8, 1, 32))
    parts = run_layer(job, LayerPlan()).backward_parts
    sums = 4 * config.layer_parameters()
    assert sums <= parts["weight gradients"] < 1.001 * sums and sum(parts.values()) < 1.01 * sums


def test_a_buffer_without_a_place_is_called_after_its_function():
    memory = AllocationCounter("meta", buffer_names.buffer_name)
    with memory, WorkCounter():
        held = inverse_frequencies(32, 5e5, device=META)
    assert memory.peak_holders().keys() == {"inverse frequencies"} and len(held) == 16
