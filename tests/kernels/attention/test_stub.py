"""The stub allocates what the kernel's source says, hand-counted, and gives results of the right shape."""

import pytest
import torch

from megacp.kernels.attention import Documents, attention_backward, attention_forward, select_backend
from megacp.memory.counting import AllocationCounter

S, D = 1024, 64


def tensors(queries, heads, kv_heads):
    q = torch.ones(queries, heads, D, dtype=torch.bfloat16)
    k, v = torch.ones(2, S, kv_heads, D, dtype=torch.bfloat16)
    return q, k, v


def peak_of_backward(name, heads, kv_heads, queries=S, documents=Documents((0, S)), deterministic=False):
    q, k, v = tensors(queries, heads, kv_heads)
    o, lse = attention_forward(q, k, v, documents, 1.0, name)
    assert o.shape == q.shape and lse.shape == (heads, queries) and lse.dtype == torch.float32
    with AllocationCounter() as counter:
        gradients = attention_backward(o, q, k, v, o, lse, documents, 1.0, name, deterministic)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert all(not g.any() for g in gradients) and o.isfinite().all()
    assert counter.live_bytes() == sum(g.nbytes for g in gradients)
    return counter.peak_bytes() - counter.live_bytes()


@pytest.mark.parametrize("name, heads, kv_heads, expected", [
    ("stub-fa4", 2, 2, S * 2 * D * 4 + 2 * 2 * S * 4),
    ("stub-fa4", 4, 1, S * 4 * D * 4 + 2 * 4 * S * 4 + 2 * S * D * 4),
    ("stub-fa2", 2, 2, S * 2 * D * 4 + 2 * S * 4),
    ("stub-torch", 4, 1, S * 4 * D * 4 + 4 * S * 4 + 2 * S * 4 * D * 2),
])
def test_workspace_of_a_backward(name, heads, kv_heads, expected):
    assert peak_of_backward(name, heads, kv_heads) == expected


def test_workspace_of_a_query_chunk_is_the_chunks():
    assert peak_of_backward("stub-fa4", 2, 2, queries=256) == 256 * 2 * D * 4 + 2 * 2 * 256 * 4


def test_packed_documents_are_padded():
    packed = peak_of_backward("stub-fa4", 1, 1, documents=Documents((0, 300, S)))
    assert packed == (S + 2 * 128) * (D * 4 + 2 * 4)


@pytest.mark.parametrize("name, heads, kv_heads, borders, more", [
    ("stub-fa4", 2, 2, (0, S), 2 * (S // 128) * 4),  # a counter for each block of queries
    ("stub-fa4", 4, 1, (0, 300, S), 2 * 4 * 6 * 4 + 2 * (2 * 6 * 2 * 4)),  # 6 blocks in the longest; two for each of keys
    ("stub-fa2", 2, 2, (0, S), 65 * S * 2 * D * 4),  # a sum of dq for each multiprocessor: 132 over 2 heads
    ("stub-torch", 1, 1, (0, 300, S), 65 * (S + 2 * 128) * D * 4),
])
def test_workspace_of_a_deterministic_backward(name, heads, kv_heads, borders, more):
    documents = Documents(borders)
    plain = peak_of_backward(name, heads, kv_heads, documents=documents)
    assert peak_of_backward(name, heads, kv_heads, documents=documents, deterministic=True) == plain + more


def test_a_stub_is_chosen_by_rehearsals_only():
    setting = (torch.device("cpu"), torch.bfloat16, D, 2, 1, Documents((0, S)))
    assert select_backend("stub", *setting).name == "stub-fa4"
    assert select_backend("stub-fa2", *setting).name == "stub-fa2"
    with pytest.raises(ValueError, match="--attention-backend reference has no stub.*; fa4, fa3, fa2, torch, cudnn have one"):
        select_backend("stub-reference", *setting)
    with pytest.raises(ValueError) as error:
        select_backend("flash", *setting)
    assert "stub" not in str(error.value)
