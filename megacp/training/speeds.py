"""How fast a GPU does each kind of work: measured on one H200, scaled for others, corrected by rehearsals and by measured all-to-alls.

    speeds = speeds_of("H100")                                           # an H200's, by the ratio of the bf16 peaks: "estimated"
    speeds = calibrated(speeds, [read_rehearsal("r.json")])              # that rehearsal's attention and GEMMs take what was measured
    speeds = with_all_to_all(speeds, read_all_to_all("a2a.json"))

A file of all-to-alls: {"all_to_all": [{"bytes_per_rank": 268435456, "seconds": 0.0009, "gpus": 8}, …]}; `bytes_per_rank` is all that
one rank hands over, its own block included. tools/measure_all_to_all.py writes it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megacp.argument_checks import ArgumentError
from megacp.planner import count_step
from megacp.planning.work import BACKWARD_FLOPS, OTHER
from megacp.training.metrics import peak_flops
from megacp.training.rehearsals import Rehearsal, check_positive, read_json, read_rehearsal

Curve = tuple[tuple[float, float], ...]  # (x, y) with x ascending; between them y is taken on a line over log x, beyond them constant

# Measured on one H200 with FlashAttention-4, D = 128, bf16, one causal document: FLOP/s by the FLOPs of a forward call, 4·D·heads·pairs.
# One head of 16K tokens and four of 16K on one KV head, alone; one head of 128K, 512K and 1M, inside a layer; one of 5M, alone.
FA4_FORWARD = ((6.9e10, 355e12), (2.75e11, 725e12), (4.4e12, 680e12), (7.0e13, 653e12), (2.8e14, 647e12), (7.0e15, 615e12))
FA4_BACKWARD = ((6.9e10, 349e12), (2.75e11, 620e12), (4.4e12, 613e12), (7.0e13, 612e12), (2.8e14, 604e12), (7.0e15, 558e12))
MATMUL = 788e12  # FLOP/s, measured there: bf16, 8192 x 8192 x 8192
# What GEMMs reach with the norms, RoPE, SwiGLU and packing around them: with it layers of Llama3-8B on one rank of 8, measured on that
# H200, come out within 2.5% at 128K tokens and 1% at 512K and 1M.
SHARE_WITH_ELEMENT_WISE = 0.75
HOST_COPY = 55e9  # bytes/s each way, measured there, pinned
DISK = 3e9  # bytes/s, one local NVMe; an estimate
HOST_UPDATE, HOST_NORM = 56e9, 27e9  # bytes/s of AdamW, and of the norm and the clipping, on one CPU core, measured
MEASURED_ON, DEFAULT_GPU = "H200", "H100"

# Of one GPU to its peers, bytes/s one way: an H200's as measured on two with 1 GiB (64 MiB: 240e9, 16 MiB: 109e9), an H100's the same
# NVLink, of others three quarters of NVIDIA's figure, as that is. And of device memory, estimates.
NVLINK = (("A100", 225e9), ("H100", 331e9), ("H200", 331e9), ("B200", 675e9))
DEVICE_MEMORY = (("A100", 2.0e12), ("H100", 3.3e12), ("H200", 4.8e12), ("B200", 8.0e12))
NODE, NETWORK = 8, 45e9  # GPUs that NVLink joins; bytes/s of a GPU's 400 Gbit/s adapter beyond


@dataclass(frozen=True)
class Speeds:
    """FLOP/s and bytes/s of one GPU. `sources` says where figures come from, for a person; `allocator_margin` is a share of the peak."""

    gpu: str
    attention_forward: Curve
    attention_backward: Curve
    gemm: dict[str, float]  # by part, what is around the GEMMs included
    host_copy: float
    disk: float
    nvlink: float
    device_memory: float
    all_to_all: dict[int, Curve]  # by GPUs: bytes/s by bytes per rank; empty: by `nvlink` and NETWORK
    allocator_margin: float | None  # None: not measured
    sources: dict[str, str]

    def source_text(self, gpus: int) -> str:
        """For a person: where each figure comes from, and of how many GPUs measured all-to-alls are when not of `gpus`."""
        sources = dict(self.sources)
        if self.all_to_all and gpus > 1:
            measured = " and ".join(map(str, sorted(self.all_to_all)))
            sources["all-to-all"] += f" with {measured} GPUs" + ("" if gpus in self.all_to_all else f", not with the {gpus} of this job")
        return "; ".join(f"{name} {source}" for name, source in sources.items())

    def attention_seconds(self, work) -> tuple[float, float]:
        """Forward and backward calls of a `Work`."""
        forward = sum(n * flops / at(self.attention_forward, flops) for flops, n in work.attention_forward.items())
        backward = sum(n * BACKWARD_FLOPS * flops / at(self.attention_backward, flops) for flops, n in work.attention_backward.items())
        return forward, backward

    def all_to_all_seconds(self, bytes_per_rank: int, gpus: int) -> float:
        """One all-to-all. Of measured numbers of GPUs the nearest counts."""
        if self.all_to_all:
            nearest = min(self.all_to_all, key=lambda measured: abs(math.log(measured / gpus)))
            return bytes_per_rank / at(self.all_to_all[nearest], bytes_per_rank)
        inside = min(gpus, NODE)
        return bytes_per_rank / gpus * ((inside - 1) / self.nvlink + (gpus - inside) / NETWORK)

    def gather_seconds(self, bytes_: int, gpus: int) -> float:
        """An all-gather to `bytes_` on each GPU, or a reduce-scatter of them, in rings: all that the others hold passes every link.

        From node to node rings share the adapters of all GPUs there; an all-to-all has its own GPU's alone.
        """
        slowest = self.nvlink if gpus <= NODE else min(self.nvlink, NODE * NETWORK)
        return bytes_ * (gpus - 1) / gpus / slowest


def at(curve: Curve, x: float) -> float:
    """The curve's value.

    >>> at(((1.0, 10.0), (100.0, 30.0)), 10.0)
    20.0
    """
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return curve[-1][1]


def speeds_from(gpu: str | None, calibration_files: list[str]) -> Speeds:
    """What --gpu and --calibrate ask for: without --gpu those of the GPU that was rehearsed on, else of an H100."""
    reports = {path: read_json(path, "--rehearse-json of pretrain_llama.py, or measured all-to-alls") for path in calibration_files}
    rehearsals = [read_rehearsal(path) for path, report in reports.items() if "all_to_all" not in report]
    for rehearsal in rehearsals:
        if rehearsal.device == "cpu":
            raise ArgumentError(f"--calibrate {rehearsal.path} was rehearsed on a CPU; a rehearsal on a GPU works")
    speeds = speeds_of(gpu or next((rehearsal.device for rehearsal in rehearsals), DEFAULT_GPU))
    if rehearsals:
        speeds = calibrated(speeds, rehearsals)
    for path, report in reports.items():
        if "all_to_all" in report:
            _check_links(path, report.get("device"), speeds.gpu)
            speeds = with_all_to_all(speeds, read_all_to_all(path))
    return speeds


def _check_links(path: str, device: str | None, gpu: str) -> None:
    """`device` None: a file that does not tell."""
    if device == "cpu":
        raise ArgumentError(f"--calibrate {path} was measured on CPUs; tools/measure_all_to_all.py on GPUs works")
    if device is not None and known_gpu(device) != known_gpu(gpu):
        raise ArgumentError(f"--calibrate {path} was measured on {device}, not on {gpu}; {_gpu_advice(device)}")


def known_gpu(device: str) -> str | None:
    """The name in the tables here of a GPU by CUDA's name, or by that which --gpu gives. None: not known.

    >>> known_gpu("NVIDIA H100 80GB HBM3"), known_gpu("NVIDIA H100 PCIe")
    ('H100', None)
    """
    return None if peak_flops(device) is None else next((name for name, _ in NVLINK if name in device), None)


def _gpu_advice(device: str) -> str:
    name = known_gpu(device)
    return f"--gpu {name} works" if name else f"speeds of {device} are not known: without the file it works"


def speeds_of(gpu: str) -> Speeds:
    """Of a GPU by name, such as CUDA's "NVIDIA H200". Raises ArgumentError for one that is not known."""
    if known_gpu(gpu) is None:
        raise ArgumentError(f"--gpu {gpu} is not known; {' or '.join(name for name, _ in NVLINK)} works")
    scale = peak_flops(gpu) / peak_flops(MEASURED_ON)
    measured = f"measured on one {MEASURED_ON}" if MEASURED_ON in gpu else f"estimated: an {MEASURED_ON}'s, by the bf16 peak"
    parts = ("projections", "mlp", "head", OTHER)
    return Speeds(
        gpu=gpu,
        attention_forward=_scaled(FA4_FORWARD, scale),
        attention_backward=_scaled(FA4_BACKWARD, scale),
        gemm=dict.fromkeys(parts, SHARE_WITH_ELEMENT_WISE * MATMUL * scale),
        host_copy=HOST_COPY,
        disk=DISK,
        nvlink=_of(NVLINK, gpu),
        device_memory=_of(DEVICE_MEMORY, gpu),
        all_to_all={},
        allocator_margin=None,
        sources={"attention": measured, "GEMM": measured, "host copies": f"measured on one {MEASURED_ON}", "all-to-all": "estimated"},
    )


def calibrated(speeds: Speeds, rehearsals: list[Rehearsal]) -> Speeds:
    """`speeds` as the rehearsals measured them. Raises ArgumentError for one that was not on such a GPU.

    Attention by the size of its calls, GEMMs by part; copies and the allocator's margin where they were measured. The all-to-all of a
    rehearsal is a local copy and corrects nothing. Nor does the time of one with stub attention, whose copies have nothing to hide
    behind, or in which not all layers computed; `sources` names these. Nor does the latter's allocator tell the margin: with fewer
    kinds of blocks to serve it held 5% to 11% less, measured with 2 of 6 layers of Llama3-8B.
    """
    for rehearsal in rehearsals:
        if known_gpu(rehearsal.device) != known_gpu(speeds.gpu):
            wrong = f"--calibrate {rehearsal.path} was rehearsed on {rehearsal.device}, not on {speeds.gpu}"
            raise ArgumentError(f"{wrong}; {_gpu_advice(rehearsal.device)}")
    sources = dict(speeds.sources)
    copies = [rehearsal.copy_bytes_per_s for rehearsal in rehearsals if rehearsal.copy_bytes_per_s]
    if copies:
        speeds, sources["host copies"] = replace(speeds, host_copy=sum(copies) / len(copies)), _by(len(copies))
    timed = [rehearsal for rehearsal in rehearsals if not rehearsal.not_timed]
    if len(timed) < len(rehearsals):
        sources["no time of"] = ", ".join(f"{one.path} ({one.not_timed})" for one in rehearsals if one.not_timed)
    if timed:
        factors = _means(_attention_factor(speeds, rehearsal) for rehearsal in timed)
        forward, backward = (_corrected(curve, factors) for curve in (speeds.attention_forward, speeds.attention_backward))
        speeds = replace(speeds, attention_forward=forward, attention_backward=backward, gemm=_gemm_speeds(speeds, timed))
        sources |= dict.fromkeys(("attention", "GEMM"), _by(len(timed)))
    margins = [rehearsal.reserved / rehearsal.peak - 1 for rehearsal in rehearsals if rehearsal.reserved and not rehearsal.few_computed]
    return replace(speeds, allocator_margin=max(margins, default=None), sources=sources)


def _by(rehearsals: int) -> str:
    return f"calibrated by {rehearsals} rehearsal{'s' * (rehearsals > 1)}"


def _attention_factor(speeds: Speeds, rehearsal: Rehearsal) -> tuple[float, float]:
    """FLOPs of a call, and how much faster calls were than predicted."""
    layers, packed = count_step(rehearsal.job, rehearsal.plans).layers, of_documents(speeds, rehearsal.pairs_share)
    predicted = sum(sum(packed.attention_seconds(work)) for layer in layers for work in (layer.forward_work, layer.backward_work))
    measured = rehearsal.part_seconds["attention"]
    if measured <= 0:
        raise ArgumentError(f"--calibrate {rehearsal.path} spent {measured} s in attention; a rehearsal of a whole step works")
    calls = layers[0].forward_work.attention_forward
    return max(calls) * rehearsal.pairs_share, predicted * rehearsal.micro_batches / measured


def _means(points: Iterable[tuple[float, float]]) -> Curve:
    """The points as a curve; of several at one x their mean."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    return tuple((x, sum(ys) / len(ys)) for x, ys in sorted(by_x.items()))


def _corrected(curve: Curve, factors: Curve) -> Curve:
    """The curve times the factors, exact where these were measured."""
    places = sorted({x for x, _ in (*curve, *factors)})
    return tuple((x, at(curve, x) * at(factors, x)) for x in places)


def _gemm_speeds(speeds: Speeds, rehearsals: list[Rehearsal]) -> dict[str, float]:
    """FLOPs by seconds of each part over all rehearsals. What no part has is the output projection, and waiting."""
    flops, seconds = dict.fromkeys(speeds.gemm, 0.0), dict.fromkeys(speeds.gemm, 0.0)
    for rehearsal in rehearsals:
        counted = count_step(rehearsal.job, rehearsal.plans)
        for part in speeds.gemm:
            flops[part] += rehearsal.micro_batches * counted.gemm_flops[part]
            known = rehearsal.step_seconds - sum(rehearsal.part_seconds.values())
            seconds[part] += known if part == OTHER else rehearsal.part_seconds[part]
    return {part: flops[part] / seconds[part] if seconds[part] > 0 else speed for part, speed in speeds.gemm.items()}


def read_all_to_all(path: str) -> dict[int, Curve]:
    """Bytes/s by bytes per rank, for each number of GPUs. Raises ArgumentError that says what is wrong with the file."""
    shape = '{"all_to_all": [{"bytes_per_rank": …, "seconds": …, "gpus": …}, …]}'
    report, points = read_json(path, f"the form {shape}"), {}
    try:
        for entry in report["all_to_all"]:
            size, seconds, gpus = (check_positive(name, entry[name]) for name in ("bytes_per_rank", "seconds", "gpus"))
            if gpus < 2 or gpus != int(gpus):
                raise ValueError(f"gpus is {gpus}: GPUs are 2 or more")
            points.setdefault(gpus, []).append((size, size / seconds))
        if not points:
            raise ValueError("no entry")
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"--calibrate {path} has no measured all-to-alls ({error}); {shape} works") from None
    return {gpus: tuple(sorted(curve)) for gpus, curve in points.items()}


def with_all_to_all(speeds: Speeds, measured: dict[int, Curve]) -> Speeds:
    return replace(speeds, all_to_all=speeds.all_to_all | measured, sources=speeds.sources | {"all-to-all": "measured"})


def of_documents(speeds: Speeds, share: float) -> Speeds:
    """`speeds`, so that attention counted over whole sequences takes as long as over documents with `share` of their pairs."""

    def packed(curve: Curve) -> Curve:
        return tuple((x / share, y / share) for x, y in curve)

    return replace(
        speeds, attention_forward=packed(speeds.attention_forward), attention_backward=packed(speeds.attention_backward)
    )  # fmt: skip


def _scaled(curve: Curve, factor: float) -> Curve:
    return tuple((x, y * factor) for x, y in curve)


def _of(table: tuple[tuple[str, float], ...], gpu: str) -> float:
    return next(value for name, value in table if name in gpu)
