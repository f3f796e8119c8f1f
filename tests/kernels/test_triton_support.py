"""Which tensors go to the Triton kernels. Those on a GPU are only described here: this runs anywhere."""

from types import SimpleNamespace

import pytest
import torch

from megacp.kernels import triton_support
from megacp.kernels.triton_support import are_rows, serves


def on_gpu(dtype=torch.bfloat16, numel=4):
    return SimpleNamespace(is_cuda=True, dtype=dtype, numel=lambda: numel)


@pytest.fixture
def triton_installed(monkeypatch):
    monkeypatch.setattr(triton_support, "_triton_is_installed", lambda: True)


@pytest.mark.usefixtures("triton_installed")
def test_kernels_serve_tensors_on_a_gpu_whose_statistics_are_fp32():
    assert serves(on_gpu(), on_gpu(torch.float32), on_gpu(torch.float16))
    assert not serves(torch.ones(4))
    assert not serves(on_gpu(), torch.ones(4)), "one on the CPU"
    assert not serves(on_gpu(torch.float64)), "float64 stays float64"
    assert not serves(on_gpu(), on_gpu(numel=0)), "nothing to launch for"


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setattr(triton_support, "_triton_is_installed", lambda: False)
    assert not serves(on_gpu())


def test_rows_may_have_one_stride_but_not_two():
    x = torch.empty(4, 6, 8)
    rows = [x, x[:, 2], x[:2], x[..., :4], x[0, 0], x[:, :1, :]]
    for tensor in rows:
        assert are_rows(tensor) and tensor.view(-1, tensor.shape[-1]).shape[1] == tensor.shape[-1]
    for tensor in (x[:, 2:4], x.transpose(0, 1), x.transpose(1, 2)):
        assert not are_rows(tensor)
    assert not are_rows(x, x[:, 2:4])
