"""The model on all GPUs through NCCL against the float64 reference: loss and every gradient, for every layout and stage size.

The same tolerances as on one GPU. With fewer ranks to a context group than there are GPUs, several groups run side by side.
"""

import pytest
import torch
import torch.distributed as dist

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from megacp import parallel_state
from megacp.kernels.attention import Documents, select_backend
from megacp.memory.policy import plan_of
from megacp.parallel_state import ParallelLayout
from tests.distributed import run_distributed
from tests.gpu.test_layer_gpu import BFLOAT16_TOLERANCE, BORDERS, TILE, config_of, our_gradients, reference_gradients
from tests.model.cases import TOLERANCE, legal_stages, relative_error

GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 4, 8) if GPUS % size == 0]  # of a context group
HEADS, KV_HEADS = 8, 2
CASES = {
    "fp32": dict(dtype=torch.float32, backend="reference"),
    "fp32, query chunks": dict(dtype=torch.float32, backend="reference", query_chunk=TILE),
    "fp32, on the host, exchanges ahead": dict(dtype=torch.float32, backend="reference", plan=plan_of("lean", "selective", prefetch=True)),
    "bf16": dict(dtype=torch.bfloat16, backend="auto"),
    "bf16, on the host, exchanges ahead": dict(dtype=torch.bfloat16, backend="auto", plan=plan_of("lean", "selective", prefetch=True)),
}
SETTINGS = [(size, heads, case) for size in SIZES for heads in legal_stages(HEADS, size) for case in CASES]


def _errors(rank, world_size, size):
    """Of a context group of `size` ranks, by stage size and case: the worst relative error, and where."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, size))
    group, place = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
    config, cu_seqlens, errors, expected = config_of(HEADS, KV_HEADS, qk_layernorm=True), BORDERS["documents"], {}, {}
    for _, heads, name in (setting for setting in SETTINGS if setting[0] == size):
        case = dict(CASES[name])
        dtype, backend = case.pop("dtype"), case.pop("backend")
        if backend == "auto":
            backend = select_backend("auto", "cuda", dtype, config.kv_channels, HEADS // size, 1, Documents(cu_seqlens)).name
        loss, grads = our_gradients(
            config, dtype, heads, cu_seqlens, backend, group=parallel_state.get_ulysses_group(), rank=place, ranks=size, **case
        )
        ours = {"loss": loss.double()} | {name: grad.double() for name, grad in grads.items()}
        for share in ours.values():
            dist.all_reduce(share, group=group)
        if dtype not in expected:
            expected_loss, expected_grads = reference_gradients(config, dtype, cu_seqlens)
            expected[dtype] = {"loss": expected_loss} | expected_grads
        errors[heads, name] = max((relative_error(ours[key].cpu(), value), key) for key, value in expected[dtype].items())
    return errors


@pytest.fixture(scope="module")
def errors():
    """By size of the context group, of each rank."""
    return {size: run_distributed(_errors, GPUS, size, timeout=300, backend="nccl") for size in SIZES}


@pytest.mark.parametrize("size, heads, case", SETTINGS)
def test_gradients_match_the_reference(size, heads, case, errors):
    tolerance = TOLERANCE[torch.float32] if case.startswith("fp32") else BFLOAT16_TOLERANCE
    for rank, of_rank in enumerate(errors[size]):
        worst, name = of_rank[heads, case]
        assert worst < tolerance, f"{name} on rank {rank}: {worst:.2e}"
