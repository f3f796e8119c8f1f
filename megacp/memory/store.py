"""The activation store: room for what every layer keeps between forward and backward, taken once for the run.

    geometry = Geometry.of(config, schedule, tokens=131072, tile_size=8192, dtype=torch.bfloat16)
    store = ActivationStore([PLANS["lean"]] * 32, geometry, device)
    kept = store.keep(3, h_Td)                 # at the layer's forward: shelves for h, outputs, lse by the layer's plan
    ...
    kept.check()                               # at its backward: nobody wrote over it since

A layer's room is written in each forward and read in the backward that follows; a second forward before it would overwrite what
the first kept, which `check` refuses.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.memory.copies import Copies
from megacp.memory.disk_region import DiskPool, DiskRegion
from megacp.memory.host_region import HostPool, HostRegion, Pending, padded
from megacp.memory.policy import DISK, GPU, HOST, RECOMPUTE, LayerPlan
from megacp.memory.shelves import DeviceBlocks, DeviceRows, DeviceStages, RegionBlocks, RegionRows, RegionStages, Tiles


class ModelShape(Protocol):
    """What the store needs to know of a model; its config has it."""

    hidden_size: int
    kv_channels: int


@dataclass(frozen=True)
class Geometry:
    """Shapes of one rank's activations. T tokens, C ranks of the Ulysses group, n query heads of a stage on a rank."""

    tokens: int
    hidden_size: int
    num_stages: int
    ulysses_degree: int
    stage_heads: int
    head_dim: int
    tile_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelShape, schedule: HeadSchedule, tokens: int, tile_size: int, dtype: torch.dtype) -> "Geometry":
        """Of a model's layer under `schedule`, with `tokens` on this rank."""
        heads = schedule.heads_per_stage // schedule.ulysses_degree
        return cls(
            tokens, config.hidden_size, len(schedule.stages), schedule.ulysses_degree, heads, config.kv_channels, tile_size, dtype
        )

    @property
    def stage_shape(self) -> tuple[int, int, int, int]:
        return self.ulysses_degree, self.tokens, self.stage_heads, self.head_dim

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tiles(self) -> Tiles:
        return [(a, min(a + self.tile_size, self.tokens)) for a in range(0, self.tokens, self.tile_size)]

    @property
    def disk_chunk(self) -> int:
        """Bytes of one transfer to or from disk: a block of the attention output, within what suits a disk."""
        block = min(self.tile_size, self.tokens) * self.stage_heads * self.head_dim * self.dtype.itemsize
        return padded(min(max(block, SMALLEST_TRANSFER), LARGEST_TRANSFER))

    @property
    def disk_staging(self) -> int:
        """Bytes of host memory between device and disk: a stage of the attention output can arrive under the attention before it."""
        stage = self.bytes_of("output") // self.num_stages
        tile_Td = min(self.tile_size, self.tokens) * self.hidden_size * self.dtype.itemsize
        chunks = -(-max(stage, 2 * tile_Td) // self.disk_chunk)
        return (max(chunks, LEAST_TRANSFERS) + 1) * self.disk_chunk  # one more, for an aligned beginning

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor of a `LayerPlan` on this rank."""
        if name in ("h", "residual_grad"):
            return self.tokens * self.hidden_size * self.dtype.itemsize
        heads = self.num_stages * self.stage_heads * self.ulysses_degree * self.tokens
        return heads * (self.lse_dtype.itemsize if name == "lse" else self.head_dim * self.dtype.itemsize)


# Bytes of a transfer: smaller ones do not fill an NVMe, larger ones wait for each other. And how many there is room for at least.
SMALLEST_TRANSFER, LARGEST_TRANSFER, LEAST_TRANSFERS = 2**20, 2**23, 8

KEPT, SCRATCH = ("h", "output", "lse"), ("residual_grad",)


def planned_bytes(plans: list[LayerPlan], geometry: Geometry, place: str) -> int:
    """Bytes that `plans` put on `place` ("gpu", "host", "disk"); what lives during one layer's backward counts once.

    The way to disk leads through the host: the staging memory counts there.
    """
    kept = sum(padded(geometry.bytes_of(name)) for plan in plans for name in KEPT if getattr(plan, name) == place)
    scratch = (padded(geometry.bytes_of(name)) for name in SCRATCH if any(getattr(plan, name) == place for plan in plans))
    staging = padded(geometry.disk_staging) if place == HOST and uses_disk(plans) else 0
    return kept + sum(scratch) + staging


def uses_disk(plans: list[LayerPlan]) -> bool:
    return any(getattr(plan, name) == DISK for plan in plans for name in KEPT)


class ActivationStore:
    """One per run and rank; `plans` has a plan a layer, and `disk_directory` is where those on disk go.

    Raises ValueError when host or disk cannot give the room.
    """

    def __init__(self, plans: list[LayerPlan], geometry: Geometry, device: torch.device, disk_directory: str | None = None):
        self.plans, self.geometry = plans, geometry
        self.copies = Copies(device)
        host_device = "meta" if device.type == "meta" else "cpu"
        host = HostPool(planned_bytes(plans, geometry, HOST), pinned=device.type == "cuda", device=host_device)
        pools: dict[str, HostPool | DiskPool] = {HOST: host}
        if uses_disk(plans):
            if disk_directory is None:
                raise ValueError("activations on disk need --disk-offload-dir DIR, a directory on a local disk")
            staging = host.take_memory(geometry.disk_staging)
            on_disk = planned_bytes(plans, geometry, DISK)
            pools[DISK] = DiskPool(disk_directory, on_disk, staging, geometry.disk_chunk, device)
        self._regions = {
            (layer, name): pools[getattr(plan, name)].take(geometry.bytes_of(name))
            for layer, plan in enumerate(plans)
            for name in KEPT
            if getattr(plan, name) in pools
        }
        self._scratch = {
            name: host.take(geometry.bytes_of(name)) for name in SCRATCH if any(getattr(plan, name) == HOST for plan in plans)
        }
        self._like_CTnD = torch.empty(geometry.stage_shape, dtype=geometry.dtype, device="meta")  # the shape of a stage
        self._forwards = [0] * len(plans)

    def keep(self, layer: int, h_Td: Tensor) -> "KeptActivations":
        """Room for what `layer` keeps in the forward that begins now; starts keeping its input."""
        self._forwards[layer] += 1
        return KeptActivations(self, layer, h_Td)

    def forwards(self, layer: int) -> int:
        return self._forwards[layer]

    def region(self, layer: int, name: str) -> HostRegion | DiskRegion | None:
        """Where `name` of `layer` lies; None: on the device."""
        return self._regions.get((layer, name))

    def residual_rows(self, g_Td: Tensor) -> RegionRows:
        """Scratch of one layer's backward for the residual gradient."""
        return RegionRows(self._scratch["residual_grad"], g_Td, self.geometry.tile_size, self.copies)

    def stages(self, region) -> DeviceStages | RegionStages:
        g = self.geometry
        if region is None:
            return DeviceStages(g.num_stages, self._like_CTnD, self.copies.device)
        return RegionStages(region, g.num_stages, self._like_CTnD, g.tiles, self.copies)

    def log_sum_exps(self, region) -> DeviceBlocks | RegionBlocks:
        g = self.geometry

        def new_block() -> Tensor:
            return torch.empty(g.stage_heads, g.tokens * g.ulysses_degree, dtype=g.lse_dtype, device=self.copies.device)

        return DeviceBlocks() if region is None else RegionBlocks(region, new_block, self.copies)


@dataclass(frozen=True)
class KeptProducts:
    """Results of matrix products on the device, taken out one by one as the backward comes to them."""

    received: dict = field(default_factory=dict)  # what the engine received: q and k, v by stage
    mlp: dict = field(default_factory=dict)  # by the tile's first token: (h_mid_td, gate_tF, up_tF)


class KeptActivations:
    """What one forward of one layer keeps: shelves `h` (rows), `outputs` (stages) and `lse` (a block a stage)."""

    def __init__(self, store: ActivationStore, layer: int, h_Td: Tensor):
        self._store, self._layer, self._forward = store, layer, store.forwards(layer)
        self.plan = store.plans[layer]
        self.outputs = store.stages(store.region(layer, "output"))
        self.lse = store.log_sum_exps(store.region(layer, "lse"))
        self.products = KeptProducts() if self.plan.products else None
        self._leaving: dict[int, Pending] = {}
        if self.plan.h == GPU:
            self.h = DeviceRows(h_Td.detach())
        else:
            self.h = RegionRows(store.region(layer, "h"), h_Td, store.geometry.tile_size, store.copies)
            self._leaving = {a: self.h.put(a, b, h_Td[a:b]) for a, b in store.geometry.tiles}

    @property
    def input_is_free(self) -> bool:
        """Whether the layer may overwrite its input, tile by tile, each after `wait_for_tile`."""
        return self.plan.h != GPU

    def wait_for_tile(self, start: int) -> None:
        """The tile of the input that begins at `start` is kept elsewhere for all work enqueued from now on."""
        if self._leaving:
            self._leaving.pop(start).wait()

    def rest(self) -> None:
        """The forward is over: only what the plan keeps on the device stays there. What is to be recomputed goes."""
        if self.plan.output == RECOMPUTE:
            self.outputs = self.lse = None
        else:
            self.outputs.rest()
            self.lse.rest()

    def check(self) -> None:
        """Raises RuntimeError when another forward of the layer took the room since."""
        overwritten = any(self._store.region(self._layer, name) is not None for name in KEPT)
        if overwritten and self._store.forwards(self._layer) != self._forward:
            raise RuntimeError(
                f"layer {self._layer} ran forward again before its backward: what it had kept is overwritten; "
                "run backward after each forward"
            )
