"""Queries of the last tokens of a stream against all its keys: what a query chunk of a stage computes."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from megacp.kernels.attention import Documents, attention_backward, attention_forward, calls, reference, select_backend
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

BORDERS = (0, 7, 8, 30, 41)


def chunked(q, k, v, do, borders, rows, backend):
    """Output, lse and gradients put together from query chunks, each seeing only the keys of `of_rows`."""
    documents, scale = Documents(borders), 0.3
    o, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float64)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a in range(0, len(q), rows):
        b = min(a + rows, len(q))
        first, seen = documents.of_rows(a, b)
        keys = slice(first, b)
        o[a:b], lse[:, a:b] = attention_forward(q[a:b], k[keys], v[keys], seen, scale, backend)
        gradients = attention_backward(do[a:b], q[a:b], k[keys], v[keys], o[a:b], lse[:, a:b], seen, scale, backend)
        dq[a:b] = gradients[0]
        dk[keys] += gradients[1]
        dv[keys] += gradients[2]
    return o, lse, dq, dk, dv


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("rows", [1, 5, 8, 40, 41])
def test_chunks_put_together_are_the_whole(rows, backend):
    q, k, v, do = random_inputs(41, 4, 2, 16, torch.float64)
    exact = naive_attention(q, k, v, BORDERS, 0.3, do)
    for name, ours, whole in zip(("o", "lse", "dq", "dk", "dv"), chunked(q, k, v, do, BORDERS, rows, backend), exact):
        assert relative_error(ours, whole) < 1e-12, name


def test_calls_cut_head_by_head_where_a_chunk_is_too_large(monkeypatch):
    """The cut is that of the CUDA backends; the reference computes in their place."""
    monkeypatch.setattr(calls, "OFFSET_LIMIT", 41 * 4 * 16)
    monkeypatch.setattr(calls, "PADDING", 0)
    seen = []

    def forward(q, k, v, documents, scale):
        seen.append((q.shape[1], len(q), len(k)))
        return reference.forward(q, k, v, documents, scale)

    q, k, v, do = random_inputs(41, 4, 2, 16, torch.float32)
    documents = Documents((0, 41))
    o, lse = calls.forward_in_calls(forward, q[20:], k, v, documents, 0.3)
    assert seen == [(1, 21, 41)] * 4
    exact_o, exact_lse, *exact = naive_attention(q, k, v, (0, 41), 0.3, torch.cat([torch.zeros_like(do[:20]), do[20:]]))
    assert relative_error(o, exact_o[20:]) < 1e-6 and relative_error(lse, exact_lse[:, 20:]) < 1e-6
    dq, dk, dv = calls.backward_in_calls(reference.backward, do[20:], q[20:], k, v, o, lse, documents, 0.3)
    assert relative_error(dq, exact[0][20:]) < 1e-6
    assert relative_error(dk, exact[1]) < 1e-6 and relative_error(dv, exact[2]) < 1e-6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_rows_see_their_documents_up_to_themselves(lengths, data):
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    stop = data.draw(st.integers(1, borders[-1]))
    start = data.draw(st.integers(0, stop - 1))
    first, seen = Documents(tuple(borders)).of_rows(start, stop)
    assert first == max(border for border in borders if border <= start)
    assert seen.total == stop - first
    assert {border + first for border in seen.cu_seqlens} == {b for b in borders if first <= b < stop} | {stop}
    clipped = seen.device_cu_seqlens("cpu", stop - start).tolist()
    assert clipped == [max(border + first - start, 0) for border in seen.cu_seqlens]


def test_keys_that_no_query_sees_are_refused():
    q, k, v, _ = random_inputs(10, 1, 1, 8, torch.float32)
    with pytest.raises(ValueError, match="past the first document's end 3"):
        attention_forward(q[4:], k, v, Documents((0, 3, 10)), 1.0, "reference")


def test_cudnn_is_refused_for_query_chunks():
    with pytest.raises(ValueError, match="--attention-backend cudnn .*--upipe-query-chunk"):
        select_backend("cudnn", "cpu", torch.bfloat16, 64, 1, 1, Documents((0, 8)), query_chunks=True)
