"""Weight gradients over tiles against float64, in one matrix and in the slices of heads that a stage owns."""

import pytest
import torch

from megacp.kernels.weight_gradient import accumulate_weight_gradient, matrix_total

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}  # bf16 factors, fp32 sums: no rounding to bf16


def tiles_of(dtype, rows, columns):
    generator = torch.Generator().manual_seed(7)
    for tokens in (5, 8, 3):
        dy_to, x_ti = (torch.randn(tokens, width, generator=generator, dtype=torch.float64) for width in (rows, columns))
        yield dy_to.to(dtype), x_ti.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stage", [slice(0, 3), slice(1, 2)])  # all heads of the ranks: a matrix in place; one head: a strided view
def test_tiles_add_up_in_the_stages_rows_and_nowhere_else(dtype, stage):
    total_od = torch.ones(2 * 3 * 4, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    total_CnDd = total_od.unflatten(0, (2, 3, 4))
    slice_CnDd = total_CnDd[:, stage]
    expected_od = torch.ones(slice_CnDd.numel() // 6, 6, dtype=torch.float64)
    with matrix_total(slice_CnDd) as total:
        for dy_to, x_ti in tiles_of(dtype, *expected_od.shape):
            accumulate_weight_gradient(total, dy_to, x_ti)
            expected_od += dy_to.double().t() @ x_ti.double()
    assert ((slice_CnDd.double() - expected_od.view_as(slice_CnDd)).norm() / expected_od.norm()).item() < TOLERANCE[dtype]
    others = [head for head in range(3) if head not in range(*stage.indices(3))]
    assert (total_CnDd[:, others] == 1).all()


def test_a_contiguous_total_is_added_to_in_place():
    total = torch.zeros(2, 3, 4)
    with matrix_total(total) as total_oi:
        assert total_oi.data_ptr() == total.data_ptr() and total_oi.shape == (6, 4)
