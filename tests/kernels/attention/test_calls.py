"""Cutting a stream into calls below the 2^31 limit, tried with a small limit and the reference as the kernel."""

import pytest
import torch

from megacp.kernels.attention import Documents, calls, reference
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

ROW = 4 * 8  # elements of a token: 4 heads of 8


class Recorder:
    """The reference as a kernel that notes the span of elements of each tensor of each call."""

    def __init__(self):
        self.spans = []

    def note(self, documents, *tensors):
        for t in tensors:
            self.spans.append((documents.total + calls.PADDING * len(documents)) * t.stride(0))

    def forward(self, q, k, v, documents, scale):
        self.note(documents, q, k, v)
        return reference.forward(q, k, v, documents, scale)

    def backward(self, do, q, k, v, o, lse, documents, scale):
        self.note(documents, do, q, k, v, o)
        assert lse.is_contiguous()
        return reference.backward(do, q, k, v, o, lse, documents, scale)


@pytest.mark.parametrize("limit_tokens,expected_calls", [
    (1000, 1),  # all of it
    (60, 2),  # documents of 20, 20 and 10 tokens, then the one of 45
    (50, 3),  # 20 and 20, 10, 45: each document counts 2 tokens more
    (45, 2 + 4),  # the last document is too long for one call: head by head
    (30, 3 + 4),
])
def test_runs_and_heads_give_the_whole(limit_tokens, expected_calls, monkeypatch):
    monkeypatch.setattr(calls, "PADDING", 2)
    monkeypatch.setattr(calls, "OFFSET_LIMIT", limit_tokens * ROW + 1)
    borders = (0, 20, 40, 50, 95)
    documents = Documents(borders)
    q, k, v, do = random_inputs(documents.total, 4, 2, 8, torch.float32)
    exact = naive_attention(q, k, v, borders, 0.3, do)
    forward, backward = Recorder(), Recorder()
    o, lse = calls.forward_in_calls(forward.forward, q, k, v, documents, 0.3)
    gradients = calls.backward_in_calls(backward.backward, do, q, k, v, o, lse, documents, 0.3)
    assert len(forward.spans) == 3 * expected_calls and len(backward.spans) == 5 * expected_calls
    assert max(forward.spans + backward.spans) < calls.OFFSET_LIMIT
    for ours, expected in zip((o, lse, *gradients), exact):
        assert relative_error(ours, expected) < 1e-6


@pytest.mark.parametrize("queries", [95, 90, 80])
def test_calls_of_few_documents_give_the_whole(queries, monkeypatch):
    """Cut by number, also where the first document's first tokens have no query."""
    monkeypatch.setattr(calls, "DOCUMENT_LIMIT", 2)
    borders = (0, 20, 40, 50, 95)
    documents, before = Documents(borders), borders[-1] - queries
    q, k, v, do = random_inputs(documents.total, 4, 2, 8, torch.float32)
    do[:before] = 0
    exact = naive_attention(q, k, v, borders, 0.3, do)
    sizes = []

    def forward(q, k, v, documents, scale):
        sizes.append((len(q), len(documents)))
        return reference.forward(q, k, v, documents, scale)

    o, lse = calls.forward_in_calls(forward, q[before:], k, v, documents, 0.3)
    dq, dk, dv = calls.backward_in_calls(reference.backward, do[before:], q[before:], k, v, o, lse, documents, 0.3)
    assert sizes == [(40 - before, 2), (55, 2)]
    for ours, expected in zip((o, lse.t(), dq), (exact[0], exact[1].t(), exact[2])):
        assert relative_error(ours, expected[before:]) < 1e-6
    for ours, expected in zip((dk, dv), exact[3:]):
        assert relative_error(ours, expected) < 1e-6


def test_padding_never_outgrows_the_stream():
    """Kernels pad accumulators by 128 tokens a document; 100,000 documents of 10 tokens at once would take 13 times the memory."""
    documents, padded = Documents(tuple(range(0, 1_000_001, 10))), []

    def forward(q, k, v, documents, scale):
        padded.append(documents.total + calls.PADDING * len(documents))
        return q, torch.zeros(1, len(q))

    q = torch.zeros(documents.total, 1, 8)
    calls.forward_in_calls(forward, q, q, q, documents, 1.0)
    assert max(padded) < 2 * documents.total and len(padded) < 20


def test_wide_strides_count_not_heads(monkeypatch):
    """One head of a tensor of 16 reaches the limit 16 times sooner than its own size says."""
    monkeypatch.setattr(calls, "PADDING", 0)
    monkeypatch.setattr(calls, "OFFSET_LIMIT", 100 * 16 * 8)
    wide = torch.randn(150, 16, 8)
    q, documents = wide[:, 3:4], Documents((0, 40, 150))
    recorder = Recorder()
    o, _ = calls.forward_in_calls(recorder.forward, q, q, q, documents, 0.3)
    assert max(recorder.spans) < calls.OFFSET_LIMIT and recorder.spans[0] == 40 * 16 * 8 and recorder.spans[-1] == 110 * 8
    assert relative_error(o, naive_attention(q, q, q, documents.cu_seqlens, 0.3)[0]) < 1e-6


def test_key_gradients_of_shared_heads_are_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(calls, "PADDING", 0)
    monkeypatch.setattr(calls, "OFFSET_LIMIT", 1)
    q, k, v, do = random_inputs(30, 16, 1, 8, torch.bfloat16)
    documents = Documents((0, 30))
    o, lse = calls.forward_in_calls(reference.forward, q, k, v, documents, 0.3)
    _, dk, dv = calls.backward_in_calls(reference.backward, do, q, k, v, o, lse, documents, 0.3)
    exact = naive_attention(q, k, v, (0, 30), 0.3, do)
    assert relative_error(dk, exact[3]) < 5e-3 and relative_error(dv, exact[4]) < 5e-3


def test_what_cannot_be_cut_is_said():
    longest = 2**31 // 128 - calls.PADDING - 1
    assert calls.offset_refusal(Documents((0, longest)), 128) is None
    assert f"up to {longest} tokens" in calls.offset_refusal(Documents((0, 5, 6 + longest)), 128)


def test_head_major_views_count_all_their_heads(monkeypatch):
    """Rows of [H, S, D] lie close together, but the output has H * D elements a token all the same."""
    monkeypatch.setattr(calls, "PADDING", 0)
    monkeypatch.setattr(calls, "OFFSET_LIMIT", 50 * ROW)
    x, documents = torch.randn(4, 80, 8).transpose(0, 1), Documents((0, 40, 80))
    recorder = Recorder()
    calls.forward_in_calls(recorder.forward, x, x, x, documents, 0.3)
    assert len(recorder.spans) == 3 * 2
