"""Where a row's time went: seconds of each part in each phase, what it did in them, and the share of what the device can do.

    parts = roofline({"forward": Phase(spans, wall_s=0.036)}, flops={"forward": {"attention": 1.1e12, "gemm": 7.1e12}}, ceilings)

    phase, part, busy_s, exposed_s, exposed_share, count, rate, unit, ceiling, ceiling_share

| part          | what                                              | against                              |
|---------------|---------------------------------------------------|--------------------------------------|
| attention     | the kernel's own FLOPs (backward: 2.5 forwards)   | matmul                               |
| gemm          | all other products, recompute counted             | matmul                               |
| element-wise  | norms, RoPE, SwiGLU, sums, packing: seconds only  |                                      |
| device copies | mostly what stands in for the all-to-all          | device copy, bytes read and written  |
| host copies   | activations to and from pinned host memory        | pinned copies, the slower direction  |
| collectives   | NCCL's kernels, where there are several ranks     |                                      |
| idle          | nothing ran                                       |                                      |

Rates are over the time that a part was busy, shares of the time over the phase, each moment given to one part (`kernel_classes`).
"""

from megacp.benchmark.ceilings import Ceilings
from megacp.benchmark.kernel_classes import ATTENTION, DEVICE_COPIES, GEMM, HOST_COPIES, Account, account
from megacp.benchmark.kernel_profile import Phase


def roofline(phases: dict[str, Phase], flops: dict[str, dict[str, int]], ceilings: Ceilings) -> list[dict]:
    """A part a dict, those that took no time left out."""
    parts = []
    for name, phase in phases.items():
        for class_, totals in account(phase.spans, phase.wall_s).items():
            if totals.busy_s:
                share = {"exposed_share": totals.exposed_s / phase.wall_s}
                rate = _rate(class_, totals, flops.get(name, {}).get(class_), ceilings)
                times = {"busy_s": totals.busy_s, "exposed_s": totals.exposed_s}
                parts.append({"phase": name, "part": class_} | times | share | {"count": totals.count} | rate)
    return parts


def outside_share(parts: list[dict]) -> float:
    """Share of all phases' time in which neither attention nor a matrix product ran."""
    inside = sum(part["exposed_s"] for part in parts if part["part"] in (ATTENTION, GEMM))
    return 1 - inside / sum(part["exposed_s"] for part in parts)


def _rate(class_: str, totals: Account, flops: int | None, ceilings: Ceilings) -> dict:
    if flops:
        work, unit, ceiling, most = flops, "FLOP/s", "matmul", ceilings.matmul
    elif class_ == DEVICE_COPIES and totals.bytes_:
        work, unit, ceiling, most = 2 * totals.bytes_, "B/s", "device copy", ceilings.device_copy
    elif class_ == HOST_COPIES and totals.bytes_:
        work, unit, ceiling, most = totals.bytes_, "B/s", "pinned copies", min(ceilings.to_host, ceilings.to_device)
    else:
        return {}
    rate = work / totals.busy_s
    return {"work": work, "rate": rate, "unit": unit, "ceiling": ceiling, "ceiling_share": rate / most}
