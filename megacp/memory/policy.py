"""Where each activation of a layer lives between forward and backward.

| tensor        | size, in u                | places                                                |
|---------------|---------------------------|-------------------------------------------------------|
| h             | 1                         | gpu, host, disk                                       |
| output        | H·D/d (1 in Llama3-8B)    | gpu, host, disk, recompute (the attention forward runs again) |
| lse           | 4·H/(2·d), a few per cent | gpu, host; goes with output when that is recomputed    |
| residual_grad | 1, during backward only   | gpu, host                                             |

`prefetch`: what the next stage needs is sent before this one's attention begins, so that exchanges run under it; takes the room of one
stage's buffers more.

`products`: the results of matrix products that backward would make again stay on the device too: q, k, v as received (1.5 u in
Llama3-8B), the MLP's gate and up (7 u) and its input (1 u).

    LayerPlan()                                           # everything on the device
    LayerPlan(h="host", output="host", lse="host")        # 2 u a layer less on the device
    PLANS["lean"]                                         # … and the residual gradient streams through the host in the stage loop
"""

from dataclasses import dataclass, replace

GPU, HOST, DISK, RECOMPUTE = "gpu", "host", "disk", "recompute"


@dataclass(frozen=True)
class LayerPlan:
    """The place of each tensor of one layer. Raises ValueError for a place that a tensor cannot have."""

    h: str = GPU
    output: str = GPU
    lse: str = GPU
    residual_grad: str = GPU
    prefetch: bool = False
    products: bool = False

    def __post_init__(self):
        allowed = dict(
            h=(GPU, HOST, DISK), output=(GPU, HOST, DISK, RECOMPUTE), lse=(GPU, HOST, RECOMPUTE),
            residual_grad=(GPU, HOST),
        )  # fmt: skip
        for name, places in allowed.items():
            if getattr(self, name) not in places:
                raise ValueError(f"{name} cannot live on {getattr(self, name)}; {', '.join(places)} can hold it")
        if (self.output == RECOMPUTE) != (self.lse == RECOMPUTE):
            raise ValueError("output and lse are recomputed together, by one attention forward, or both kept")
        if self.products and {self.h, self.output, self.lse, self.residual_grad} != {GPU}:
            raise ValueError("products are kept where everything is: on the device")


def plan_of(activation_memory: str, recompute_granularity: str, prefetch: int = 0) -> LayerPlan:
    """The plan that --activation-memory, --recompute-granularity and --upipe-prefetch name, the same for every layer."""
    plan = replace(PLANS[activation_memory], prefetch=bool(prefetch), products=recompute_granularity == "none")
    return replace(plan, output=RECOMPUTE, lse=RECOMPUTE) if recompute_granularity == "full" else plan


PLANS = {
    "gpu": LayerPlan(),
    "host": LayerPlan(h=HOST, output=HOST, lse=HOST),
    "disk": LayerPlan(h=DISK, output=DISK, lse=HOST),
    "lean": LayerPlan(h=HOST, output=HOST, lse=HOST, residual_grad=HOST),
}
