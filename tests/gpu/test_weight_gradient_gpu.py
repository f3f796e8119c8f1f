"""Weight gradients on a GPU: bf16 factors summed in fp32 by the GEMM itself, without a product of the weight's size beside it."""

import pytest
import torch

from megacp.kernels.weight_gradient import accumulate_weight_gradient, matrix_total
from tests.gpu.timing import median_ms

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


def random(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize("stage", [slice(0, 4), slice(1, 2)])  # a matrix in place; a strided view
def test_tiles_add_up_in_fp32(stage):
    total_od = torch.randn(8 * 4 * 128, 1024, device="cuda")
    total_CnDd = total_od.unflatten(0, (8, 4, 128))
    expected = total_CnDd.double()
    with matrix_total(total_CnDd[:, stage]) as total:
        for tokens in (2048, 1000):
            dy_to, x_td = random(tokens, len(total)), random(tokens, 1024)
            accumulate_weight_gradient(total, dy_to, x_td)
            expected[:, stage] += (dy_to.double().t() @ x_td.double()).view_as(expected[:, stage])
    error = (total_CnDd - expected).norm() / expected.norm()
    assert error.item() < 2e-6


def test_no_product_of_the_size_of_the_weight_is_made():
    """Also prints what the sum costs beside the bare product, for the gate projection of Llama3-8B."""
    total_Fd = torch.zeros(14336, 4096, device="cuda")
    dy_tF, x_td = random(8192, 14336), random(8192, 4096)
    accumulate_weight_gradient(total_Fd, dy_tF, x_td)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accumulate_weight_gradient(total_Fd, dy_tF, x_td)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < total_Fd.nbytes / 100

    product = median_ms(lambda: torch.mm(dy_tF.t(), x_td, out_dtype=torch.float32))
    product_and_sum = median_ms(lambda: total_Fd.add_(torch.mm(dy_tF.t(), x_td, out_dtype=torch.float32)))
    ours = median_ms(lambda: accumulate_weight_gradient(total_Fd, dy_tF, x_td))
    print(f"\nproduct {product:.3f} ms, and then the sum {product_and_sum:.3f} ms, in one {ours:.3f} ms")
    assert ours < 1.02 * product_and_sum
