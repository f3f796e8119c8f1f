"""Which part of the work a kernel is, by its name, and how much of the time each part is alone responsible for.

>>> kernel_class("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"), kernel_class("Memcpy HtoD (Pinned -> Device)")
('gemm', 'host copies')

Kernels of several streams run at once, so seconds by class can add up to more than the time that passed. `account` gives each
moment to one class, the first of `CLASSES` that runs then; what is left is idle:

    time      0   1   2   3   4   5
    gemm      |-------|                         busy 2, exposed 2
    copies        |-----------|                 busy 3, exposed 2: under the gemm it cost nothing
    idle                      |---|             1 of the 5 seconds of the phase

>>> spans = [Span("nvjet_a", 0.0, 2.0), Span("Memcpy HtoD (Pinned -> Device)", 1.0, 4.0)]
>>> accounts = account(spans, wall_s=5.0)
>>> [(name, a.busy_s, a.exposed_s) for name, a in accounts.items() if a.exposed_s]
[('gemm', 2.0, 2.0), ('host copies', 3.0, 2.0), ('idle', 1.0, 1.0)]

Names are those of CUDA kernels, or on a CPU of operators (`aten::mm`) and of the range around an attention call.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

ATTENTION, GEMM, ELEMENTWISE, COLLECTIVES, DEVICE_COPIES, HOST_COPIES, IDLE = CLASSES = (
    "attention", "gemm", "element-wise", "collectives", "device copies", "host copies", "idle",
)  # fmt: skip

# The first that matches counts. FlashAttention-4 and QuACK are both "kernel_cutlass_…", as are cuBLAS's older products.
KERNEL_PATTERNS = (
    (r"^nccl", COLLECTIVES),
    (r"^Memcpy (HtoD|DtoH)", HOST_COPIES),
    (r"^Memcpy", DEVICE_COPIES),
    (r"flash|fmha|sdpa|attention", ATTENTION),
    (r"rms_?norm|layer_?norm|softmax|rope|rotary|swiglu|cross_?entropy|elementwise|\breduce_kernel|triton", ELEMENTWISE),
    (r"gemm|nvjet|xmma|cublas|split_?k|cutlass", GEMM),
)
ATTENTION_RANGE = "attention call"
OPERATOR_PATTERNS = (
    (rf"^{ATTENTION_RANGE}$", ATTENTION),
    (r"^aten::_?(scaled_dot_product|flash_attention|efficient_attention)", ATTENTION),
    (r"^aten::(mm|addmm_?|bmm|baddbmm_?|matmul|linear|einsum|addmv|mv|dot)$", GEMM),
    (r"^aten::copy_$", DEVICE_COPIES),
)


@dataclass(frozen=True)
class Span:
    """A kernel, or on a CPU an operator. Seconds on any common clock; `bytes_` of a copy, where the profiler tells them."""

    name: str
    start_s: float
    stop_s: float
    bytes_: int = 0
    on_cpu: bool = False


@dataclass
class Account:
    """Of a class in a phase. `exposed_s`: while it ran and no class before it did. `bytes_` of its copies."""

    busy_s: float = 0.0
    exposed_s: float = 0.0
    count: int = 0
    bytes_: int = 0


def kernel_class(name: str, on_cpu: bool = False) -> str:
    """One of `CLASSES`; what nothing matches is element-wise."""
    patterns = OPERATOR_PATTERNS if on_cpu else KERNEL_PATTERNS
    return next((class_ for pattern, class_ in patterns if re.search(pattern, name, re.IGNORECASE)), ELEMENTWISE)


def account(spans: Iterable[Span], wall_s: float) -> dict[str, Account]:
    """An account for each class, in order. The exposed seconds of all, idle included, add up to `wall_s`.

    (To more when kernels ran longer than that: then idle is 0.)
    """
    accounts = {name: Account() for name in CLASSES}
    edges = []
    for span in spans:
        class_ = kernel_class(span.name, span.on_cpu)
        totals = accounts[class_]
        totals.busy_s += span.stop_s - span.start_s
        totals.count += 1
        totals.bytes_ += span.bytes_
        edges += [(span.start_s, 1, CLASSES.index(class_)), (span.stop_s, -1, CLASSES.index(class_))]
    running, before = [0] * len(CLASSES), 0.0
    for moment, change, index in sorted(edges):
        first = next((name for name, count in zip(CLASSES, running) if count), None)
        if first is not None:
            accounts[first].exposed_s += moment - before
        running[index] += change
        before = moment
    idle = max(0.0, wall_s - sum(totals.exposed_s for totals in accounts.values()))
    accounts[IDLE] = Account(idle, idle)
    return accounts
