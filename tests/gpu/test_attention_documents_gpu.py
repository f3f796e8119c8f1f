"""Streams of very many short documents, and head shapes at the edge of what a kernel takes."""

import itertools
import warnings

import pytest
import torch

from megacp.benchmark.clock import call_seconds
from megacp.kernels.attention import Documents, attention_backward, attention_forward, fa4, select_backend
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SCALE = 128**-0.5


def require(name, documents, heads=2, kv_heads=1, head_dim=128):
    try:
        select_backend(name, DEVICE, torch.bfloat16, head_dim, heads, kv_heads, documents)
    except ValueError as refused:
        pytest.skip(str(refused))


def inputs_of(documents):
    """(q, k, v, do) of two query heads on one, made on the device: on the host they would take longer than the test."""
    return tuple(torch.randn(documents.total, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (2, 1, 1, 2))


def both_ways(backend, documents, inputs, scale=SCALE):
    q, k, v, do = inputs
    o, lse = attention_forward(q, k, v, documents, scale, backend)
    return o, *attention_backward(do, q, k, v, o, lse, documents, scale, backend)


@pytest.mark.parametrize("backend", ["fa4", "torch", "fa3", "fa2"])
@pytest.mark.parametrize("lengths", [
    [1 + 7 * i % 20 for i in range(100_000)],  # FlashAttention-2 launches no more than 65,535 at once
    [20_000, *(1 + 11 * i % 150 for i in range(12_000)), 30_000],
], ids=["100000_documents", "long_and_short"])
def test_short_documents_among_very_many(backend, lengths):
    borders = tuple(itertools.accumulate(lengths, initial=0))
    documents = Documents(borders)
    require(backend, documents)
    inputs = inputs_of(documents)
    results = both_ways(backend, documents, inputs)
    for first in (1, len(documents) // 2, len(documents) - 90):  # naive attention over forty documents at a time
        part = slice(borders[first], borders[first + 40])
        inner = tuple(border - part.start for border in borders[first:first + 41])
        exact_o, _, *exact = naive_attention(*(x[part] for x in inputs[:3]), inner, SCALE, inputs[3][part])
        for name, ours, expected in zip(("o", "dq", "dk", "dv"), results, (exact_o, *exact)):
            assert relative_error(ours[part], expected) < 1e-2, (name, first)


@pytest.mark.parametrize("backend", ["fa4", "torch"])
def test_a_million_tokens_in_ten_thousand_documents_are_fast(backend):
    """They have a ten-thousandth of one document's pairs, which take a second. What is left is memory traffic, some 10 GB of it."""
    borders = tuple(2**20 * i // 10_000 for i in range(10_001))
    documents = Documents(borders)
    require(backend, documents)
    inputs = inputs_of(documents)
    both_ways(backend, documents, inputs)  # compiles
    assert call_seconds(lambda: both_ways(backend, documents, inputs), DEVICE, 3) < 0.050


@pytest.mark.parametrize("backend", ["fa4", "cudnn", "torch", "fa3", "fa2"])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(5, 1, 128), (16, 1, 128), (6, 2, 72), (4, 2, 192), (2, 1, 256)])
def test_shapes_at_the_edge(backend, heads, kv_heads, head_dim):
    borders = (0, 300, 301, 1000)
    documents = Documents(borders)
    require(backend, documents, heads, kv_heads, head_dim)
    inputs = random_inputs(documents.total, heads, kv_heads, head_dim, torch.bfloat16, device=DEVICE)
    results = both_ways(backend, documents, inputs, head_dim**-0.5)
    exact_o, _, *exact = naive_attention(*inputs[:3], borders, head_dim**-0.5, inputs[3])
    for name, ours, expected in zip(("o", "dq", "dk", "dv"), results, (exact_o, *exact)):
        assert relative_error(ours, expected) < 1e-2, name


def test_compiling_leaves_the_console_readable():
    documents = Documents((0, 100))
    require("fa4", documents, 1, 1, 56)
    fa4._interface.cache_clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        both_ways("fa4", documents, random_inputs(100, 1, 1, 56, torch.bfloat16, device=DEVICE))
    assert not [warning for warning in shown if "aux_data" in str(warning.message)]
