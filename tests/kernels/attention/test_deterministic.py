"""The deterministic backward: the same bits twice, and how kernels are told of it."""

import sys
import types
import warnings

import pytest
import torch

from megacp.kernels.attention import Documents, attention_backward, attention_forward, fa2, fa4, torch_flash
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

BORDERS = (0, 30, 31, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_same_bits_twice(backend, dtype):
    documents = Documents(BORDERS)
    q, k, v, do = random_inputs(200, 4, 2, 16, dtype)

    def results():
        o, lse = attention_forward(q, k, v, documents, 0.25, backend)
        return o, lse, *attention_backward(do, q, k, v, o, lse, documents, 0.25, backend, deterministic=True)

    first = results()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, results()))
    assert relative_error(first[2], naive_attention(q, k, v, BORDERS, 0.25, do)[2]) < 8e-3


@pytest.mark.parametrize("warn_only", [None, True, False])
def test_torch_is_told_for_the_length_of_a_call(warn_only, monkeypatch):
    """Its CUDA kernel asks the global setting alone, and takes a mere warning for a no."""
    seen = []
    monkeypatch.setattr(torch_flash.calls, "backward_in_calls", lambda *args: seen.append(settings()))
    cuda = types.SimpleNamespace(device=torch.device("cuda"))

    def settings():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    try:
        if warn_only is not None:
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
        before = settings()
        for deterministic in (True, False):
            torch_flash.backward(None, cuda, None, None, None, None, None, 1.0, deterministic)
        assert seen == [(True, False), before] and settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def flash_attention(monkeypatch):
    """The modules of fa4 and fa2, with functions that note how they are called and warn as FA4's compiler does."""
    noted = []

    def backward(do, q, k, v, o, lse=None, *results, **settings):
        for argument in ("aux_data", "window"):
            warnings.warn(f"Argument {argument} (position 21) cannot be converted to a JitArgument for function 'f'. Its type ...")
        noted.append((q.dim(), settings["deterministic"]))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fa4.MODULE, types.SimpleNamespace(_flash_attn_bwd=backward))
    monkeypatch.setitem(sys.modules, fa2.MODULE, types.SimpleNamespace(_flash_attn_varlen_backward=backward))
    fa4._interface.cache_clear()
    yield noted
    fa4._interface.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["fa4", "fa2"])
@pytest.mark.parametrize("borders", [(0, 200), BORDERS])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_is_told(flash_attention, backend, borders, deterministic):
    q, k, v, do = random_inputs(200, 4, 2, 16, torch.bfloat16)
    attention_backward(do, q, k, v, q, torch.zeros(4, 200), Documents(borders), 0.25, backend, deterministic)
    dense = backend == "fa4" and len(borders) == 2
    assert flash_attention == [(4 if dense else 3, deterministic)]


def test_the_console_keeps_all_warnings_but_that_of_the_argument_we_do_not_use(flash_attention):
    q, k, v, do = random_inputs(200, 4, 2, 16, torch.bfloat16)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            attention_backward(do, q, k, v, q, torch.zeros(4, 200), Documents((0, 200)), 0.25, "fa4")
    assert ["window" in str(warning.message) for warning in shown] == [True, True]
