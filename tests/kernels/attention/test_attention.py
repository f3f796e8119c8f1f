"""Every backend that runs on a CPU against naive float64 attention: values, gradients, documents, GQA, views, chunks."""

import itertools

import pytest
import torch

from megacp.kernels.attention import Documents, attention_backward, attention_forward, cudnn, reference
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

BACKENDS = ("reference", "torch")
# fp32: the promised 1e-6. bf16: o, p and ds are each rounded to 8 bits (2^-9 relative), and errors of a few roundings add up.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
STREAMS = {"one": (0, 67), "uneven": (0, 1, 2, 33, 34, 67), "singles": tuple(range(9)), "one token": (0, 1)}


def check(backend, dtype, borders, heads, kv_heads, head_dim, tolerance=None, seed=0):
    documents, scale = Documents(borders), head_dim**-0.5
    q, k, v, do = random_inputs(documents.total, heads, kv_heads, head_dim, dtype, seed)
    o, lse = attention_forward(q, k, v, documents, scale, backend)
    gradients = attention_backward(do, q, k, v, o, lse, documents, scale, backend)
    exact_o, exact_lse, *exact_gradients = naive_attention(q, k, v, borders, scale, do)
    tolerance = tolerance or TOLERANCE[dtype]
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(o, exact_o) < tolerance
    lse_tolerance = min(tolerance, 2e-4)  # torch's CPU kernel has a coarser exp for 16-bit inputs
    torch.testing.assert_close(lse.double(), exact_lse, rtol=lse_tolerance, atol=lse_tolerance)
    floor = do.double().norm().item()  # where softmax has one entry, dq and dk are 0: a difference of terms of the size of do
    for name, ours, exact, like in zip("qkv", gradients, exact_gradients, (q, k, v)):
        assert ours.dtype == dtype and ours.shape == like.shape
        assert relative_error(ours, exact, floor) < tolerance, f"d{name}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (4, 2), (3, 1)])
def test_forward_and_backward_match_naive_float64(backend, dtype, stream, heads, kv_heads):
    check(backend, dtype, STREAMS[stream], heads, kv_heads, head_dim=16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_head_dims_of_real_models(backend, head_dim):
    check(backend, torch.float32, (0, 100, 101, 400), 4, 2, head_dim)


@pytest.mark.parametrize("backend", BACKENDS)
def test_thousands_of_documents(backend):
    lengths = [1 + (7 * i) % 3 for i in range(2000)]
    borders = tuple(itertools.accumulate(lengths, initial=0))
    documents = Documents(borders)
    q, k, v, do = random_inputs(documents.total, 2, 1, 8, torch.float32)
    o, lse = attention_forward(q, k, v, documents, 0.5, backend)
    gradients = attention_backward(do, q, k, v, o, lse, documents, 0.5, backend)
    for cut in (0, 1000, 1900):  # naive attention over a hundred documents at a time
        part, inner = slice(borders[cut], borders[cut + 100]), tuple(b - borders[cut] for b in borders[cut:cut + 101])
        exact = naive_attention(q[part], k[part], v[part], inner, 0.5, do[part])
        assert relative_error(o[part], exact[0]) < 1e-6 and relative_error(lse[:, part], exact[1]) < 1e-6
        for ours, expected in zip(gradients, exact[2:]):
            assert relative_error(ours[part], expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_into_wider_tensors_give_the_same_as_copies(backend):
    documents = Documents((0, 5, 30))
    wide_q, wide_kv = torch.randn(30, 8, 16), torch.randn(2, 30, 4, 16)
    q, k, v = wide_q[:, 2:6], wide_kv[0, :, 1:3], wide_kv[1, :, 1:3]
    do = torch.randn(4, 30, 16).transpose(0, 1)
    assert not any(t.is_contiguous() for t in (q, k, v, do))
    o, lse = attention_forward(q, k, v, documents, 0.25, backend)
    strided_o, strided_lse = o.transpose(0, 1).contiguous().transpose(0, 1), lse.t().contiguous().t()
    gradients = attention_backward(do, q, k, v, strided_o, strided_lse, documents, 0.25, backend)
    q, k, v, do = (t.contiguous() for t in (q, k, v, do))
    again, lse_again = attention_forward(q, k, v, documents, 0.25, backend)
    torch.testing.assert_close(o, again, rtol=1e-6, atol=1e-6)
    expected = attention_backward(do, q, k, v, again, lse_again, documents, 0.25, backend)
    for ours, same in zip(gradients, expected):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("elements", [1, 200, 900])
def test_reference_in_chunks_of_queries(elements, monkeypatch):
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", elements)
    check("reference", torch.float64, STREAMS["uneven"], 4, 2, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_leaks_from_the_future_or_another_document(backend):
    documents = Documents((0, 4, 10))
    q, k, v, _ = random_inputs(10, 2, 1, 8, torch.float32)
    before, _ = attention_forward(q, k, v, documents, 0.3, backend)
    k[7], v[7] = 100.0, 1e6
    after, _ = attention_forward(q, k, v, documents, 0.3, backend)
    assert torch.equal(before[:7], after[:7]) and not torch.equal(before[7:], after[7:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_stay_finite(backend):
    q, k, v, do = random_inputs(40, 2, 2, 8, torch.float32)
    q, documents = q * 1000, Documents((0, 40))
    o, lse = attention_forward(q, k, v, documents, 1.0, backend)
    gradients = attention_backward(do, q, k, v, o, lse, documents, 1.0, backend)
    exact_o, exact_lse, *_ = naive_attention(q, k, v, (0, 40), 1.0)
    assert relative_error(o, exact_o) < 1e-3 and relative_error(lse, exact_lse) < 1e-6
    assert all(t.isfinite().all() for t in gradients)


def test_backends_share_output_and_lse():
    """The backward may run on another backend than the forward, as when a checkpoint moves between machines."""
    documents = Documents((0, 9, 40))
    q, k, v, do = random_inputs(40, 4, 2, 16, torch.float64)
    exact = naive_attention(q, k, v, documents.cu_seqlens, 0.25, do)
    for first, second in (BACKENDS, BACKENDS[::-1]):
        o, lse = attention_forward(q, k, v, documents, 0.25, first)
        for ours, expected in zip(attention_backward(do, q, k, v, o, lse, documents, 0.25, second), exact[2:]):
            assert relative_error(ours, expected) < 1e-13


def test_cudnn_document_of_one_token_in_closed_form():
    q, k, v, do = random_inputs(1, 6, 2, 16, torch.float32)
    exact = naive_attention(q, k, v, (0, 1), 0.25, do)
    o, lse = cudnn.one_token_forward(q, k, v, 0.25)
    for ours, expected in zip((o, lse, *cudnn.one_token_backward(do, q, k)), exact):
        assert ours.shape == expected.shape and relative_error(ours, expected, floor=1.0) < 1e-6


@pytest.mark.parametrize("shapes,message", [
    (((8, 3, 4), (8, 2, 4), (8, 2, 4)), "K dividing H"),
    (((8, 2, 4), (8, 2, 4), (8, 1, 4)), "K dividing H"),
    (((8, 2, 4), (7, 2, 4), (7, 2, 4)), "K dividing H"),
    (((9, 2, 4), (9, 2, 4), (9, 2, 4)), "documents of 8 tokens do not fit a stream of 9"),
])
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention_forward(*(torch.zeros(shape) for shape in shapes), Documents((0, 8)), 1.0, "reference")


def test_strided_head_dim_and_misfit_backward_are_named():
    q = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match="contiguous"):
        attention_forward(torch.zeros(8, 4, 2).transpose(1, 2), q, q, Documents((0, 8)), 1.0, "torch")
    with pytest.raises(ValueError, match=r"lse \[8, 2\]"):
        attention_backward(q, q, q, q, q, torch.zeros(8, 2), Documents((0, 8)), 1.0, "torch")
