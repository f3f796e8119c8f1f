"""Each attention backend that this GPU has, in bf16 against float64: documents, GQA, strided views, and past 2^31 elements."""

import pytest
import torch

from megacp.kernels.attention import Documents, attention_backward, attention_forward, calls, select_backend
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
# p, ds and every result are rounded to bf16, 2^-9 relative at most each: 2e-3 to 6e-3 in norm. One wrong row in 2,000, a key
# too many or too few, or a wrong scale moves the norm by 2e-2 and more.
TOLERANCE = 1e-2
LSE_TOLERANCE = 1e-3  # absolute; lse comes from fp32 sums of exact products


def require(name, documents, heads, kv_heads, head_dim):
    try:
        select_backend(name, DEVICE, torch.bfloat16, head_dim, heads, kv_heads, documents)
    except ValueError as refused:
        pytest.skip(str(refused))


def strided(*tensors):
    """The same values as views into one wider tensor, as head slices of a projection are."""
    wide = torch.empty(tensors[0].shape[0], sum(t.shape[1] for t in tensors) + 1, tensors[0].shape[2], dtype=tensors[0].dtype,
                       device=tensors[0].device)
    views, head = [], 1
    for t in tensors:
        views.append(wide[:, head:head + t.shape[1]])
        views[-1].copy_(t)
        head += t.shape[1]
    return views


@pytest.mark.parametrize("borders,heads,kv_heads,head_dim", [
    ((0, 1, 130, 131, 700, 2048), 4, 1, 128),
    ((0, 2000), 1, 1, 128),  # a stage of UPipe: one document, one head
    ((0, 300, 1000), 4, 2, 64),
], ids=["documents", "one_document", "head_dim_64"])
@pytest.mark.parametrize("backend", ["torch", "cudnn", "fa4", "fa3", "fa2", "reference"])
def test_backend_matches_float64(backend, borders, heads, kv_heads, head_dim):
    documents, scale = Documents(borders), head_dim**-0.5
    require(backend, documents, heads, kv_heads, head_dim)
    q, k, v, do = strided(*random_inputs(documents.total, heads, kv_heads, head_dim, torch.bfloat16, device=DEVICE))
    o, lse = attention_forward(q, k, v, documents, scale, backend)
    gradients = attention_backward(do, q, k, v, o, lse, documents, scale, backend)
    exact_o, exact_lse, *exact_gradients = naive_attention(q, k, v, borders, scale, do)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32 and lse.shape == (heads, documents.total)
    assert (lse - exact_lse).abs().max().item() < LSE_TOLERANCE
    errors = {name: relative_error(ours, exact)
              for name, ours, exact in zip(("o", "dq", "dk", "dv"), (o, *gradients), (exact_o, *exact_gradients))}
    assert max(errors.values()) < TOLERANCE, errors


def test_reference_in_fp32_matches_float64():
    documents = Documents((0, 1, 400, 1000))
    q, k, v, do = random_inputs(1000, 4, 2, 64, torch.float32, device=DEVICE)
    o, lse = attention_forward(q, k, v, documents, 0.125, "reference")
    results = (o, lse, *attention_backward(do, q, k, v, o, lse, documents, 0.125, "reference"))
    for ours, exact in zip(results, naive_attention(q, k, v, documents.cu_seqlens, 0.125, do)):
        assert relative_error(ours, exact) < 2e-6


@pytest.mark.parametrize("backend", ["torch", "fa3", "fa2"])
def test_documents_of_one_token(backend):
    """At a longest document of 1, FlashAttention-2 would take the call for decoding and fold heads into tokens."""
    documents = Documents(tuple(range(201)))
    require(backend, documents, 4, 1, 128)
    q, k, v, do = random_inputs(200, 4, 1, 128, torch.bfloat16, device=DEVICE)
    o, lse = attention_forward(q, k, v, documents, 0.1, backend)
    dq, dk, dv = attention_backward(do, q, k, v, o, lse, documents, 0.1, backend)
    assert relative_error(o, v.double().expand(-1, 4, -1)) < 1e-3
    assert (lse - 0.1 * (q.double() * k.double()).sum(-1).t()).abs().max().item() < LSE_TOLERANCE
    assert relative_error(dv, do.double().sum(1, keepdim=True)) < TOLERANCE
    assert max(dq.abs().max().item(), dk.abs().max().item()) < 1e-2  # 0 but for the rounding of do v^T - do o


@pytest.mark.parametrize("backend", ["torch", "cudnn", "fa4", "fa3", "fa2"])
def test_a_stream_of_more_than_2_to_the_31_elements(backend):
    """130 equal documents of 32K tokens: each must come out as one of them does alone."""
    length, count, heads, head_dim = 2**15, 130, 4, 128
    assert length * count * heads * head_dim > calls.OFFSET_LIMIT
    documents, one = Documents(tuple(range(0, length * count + 1, length))), Documents((0, length))
    require(backend, documents, heads, 1, head_dim)
    inputs = random_inputs(length, heads, 1, head_dim, torch.bfloat16, device=DEVICE)
    q_1, k_1, v_1, do_1 = inputs
    o_1, lse_1 = attention_forward(q_1, k_1, v_1, one, 0.09, "torch")
    alone = (o_1, *attention_backward(do_1, q_1, k_1, v_1, o_1, lse_1, one, 0.09, "torch"))
    q, k, v, do = (t.expand(count, *t.shape).flatten(0, 1) for t in inputs)
    o, lse = attention_forward(q, k, v, documents, 0.09, backend)
    gradients = attention_backward(do, q, k, v, o, lse, documents, 0.09, backend)
    del q, k, v, do
    for index, (start, stop) in enumerate(documents.spans()):
        assert (lse[:, start:stop] - lse_1).abs().max().item() < LSE_TOLERANCE, index
        for name, whole, expected in zip(("o", "dq", "dk", "dv"), (o, *gradients), alone):
            error = ((whole[start:stop].float() - expected.float()).norm() / expected.float().norm()).item()
            assert error < TOLERANCE, (name, index, error)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", ["torch", "cudnn", "fa4", "fa3", "fa2"])
def test_one_document_whose_view_spans_2_to_the_31_elements(backend):
    """266K tokens in rows of 8,192 elements; its last rows are checked, where offsets are largest."""
    tokens, rows, head_dim, scale = 2**18 + 4096, 64, 128, 0.09
    documents = Documents((0, tokens))
    require(backend, documents, 4, 1, head_dim)
    wide = torch.randn(tokens, 64, head_dim, dtype=torch.bfloat16, device=DEVICE)
    assert tokens * wide.stride(0) > calls.OFFSET_LIMIT
    q, k, v, do = wide[:, 0:4], wide[:, 4:5], wide[:, 5:6], wide[:, 6:10]
    o, lse = attention_forward(q, k, v, documents, scale, backend)
    dq, dk, dv = attention_backward(do, q, k, v, o, lse, documents, scale, backend)

    q64, do64 = (t[-rows:].double().transpose(0, 1) for t in (q, do))
    k64, v64 = k[:, 0].double(), v[:, 0].double()
    scores = q64 @ k64.t() * scale
    scores[..., -rows:].masked_fill_(torch.ones(rows, rows, dtype=torch.bool, device=DEVICE).triu(1), float("-inf"))
    p = torch.softmax(scores, -1)
    o64 = p @ v64
    ds = p * (do64 @ v64.t() - (do64 * o64).sum(-1, keepdim=True)) * scale
    assert (lse[:, -rows:] - torch.logsumexp(scores, -1)).abs().max().item() < LSE_TOLERANCE
    last_keys = slice(tokens - rows, tokens)  # seen by the last rows alone
    for name, ours, exact in (
        ("o", o[-rows:].transpose(0, 1), o64),
        ("dq", dq[-rows:].transpose(0, 1), ds @ k64),
        ("dk", dk[last_keys, 0], torch.einsum("hqk,hqd->kd", ds[..., last_keys], q64)),
        ("dv", dv[last_keys, 0], torch.einsum("hqk,hqd->kd", p[..., last_keys], do64)),
    ):
        # Over so many keys o and dq shrink to differences of rounded terms, so twice the tolerance.
        assert relative_error(ours, exact) < 2 * TOLERANCE, name


def test_auto_takes_a_fused_backend_and_says_why():
    choice = select_backend("auto", DEVICE, torch.bfloat16, 128, 4, 1, Documents((0, 2**20)))
    assert choice.name in ("fa4", "fa3", "cudnn", "torch") and choice.reason.startswith(choice.name)
    print(choice.reason)
