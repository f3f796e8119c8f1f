"""A deterministic backward gives the same bits each time, and those of a whole training step are the same in two runs."""

import re

import pytest
import torch

from megacp.kernels.attention import Documents, attention_backward, attention_forward, select_backend
from tests.kernels.attention.naive import naive_attention, random_inputs, relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.test_training_gpu import GPUS, train

DEVICE = torch.device("cuda", 0)
TOKENS, REPETITIONS = 8192, 10
MANY = tuple(range(0, TOKENS + 1, 16))  # 512 documents: more than 256 take another way through FA4's scheduler


def require(name, documents, kv_heads, query_chunks=False):
    try:
        select_backend(name, DEVICE, torch.bfloat16, 128, 4, kv_heads, documents, query_chunks, deterministic=True)
    except ValueError as refused:
        pytest.skip(str(refused))


def gradients_repeat(backend, borders, kv_heads, queries=TOKENS):
    """Every repetition has the bits of the first, whose gradients are returned with the inputs."""
    documents, scale = Documents(borders), 128**-0.5
    require(backend, documents, kv_heads, query_chunks=queries < TOKENS)
    q, k, v, do = random_inputs(TOKENS, 4, kv_heads, 128, torch.bfloat16, device=DEVICE)
    q_end, do_end = q[TOKENS - queries:], do[TOKENS - queries:]
    o, lse = attention_forward(q_end, k, v, documents, scale, backend)
    first = attention_backward(do_end, q_end, k, v, o, lse, documents, scale, backend, deterministic=True)
    for _ in range(REPETITIONS):
        again, lse_again = attention_forward(q_end, k, v, documents, scale, backend)
        assert torch.equal(again, o) and torch.equal(lse_again, lse)
        repeated = attention_backward(do_end, q_end, k, v, o, lse, documents, scale, backend, deterministic=True)
        for name, ours, before in zip(("dq", "dk", "dv"), repeated, first):
            assert torch.equal(ours, before), name
    return first, (q, k, v, do)


@pytest.mark.parametrize("borders", [(0, TOKENS), (0, 5, 3000, 3001, 5500, TOKENS), MANY], ids=["one", "documents", "many"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("backend", ["fa4", "torch", "fa2", "reference"])
def test_the_same_bits_each_time(backend, kv_heads, borders):
    first, (q, k, v, do) = gradients_repeat(backend, borders, kv_heads)
    *_, dq, dk, dv = naive_attention(q, k, v, borders, 128**-0.5, do)
    for ours, exact in zip(first, (dq, dk, dv)):
        assert relative_error(ours, exact) < 1e-2


@pytest.mark.parametrize("backend", ["fa4", "torch", "reference"])
def test_the_same_bits_of_a_query_chunk(backend):
    """The last 2,000 tokens have queries, from the middle of a document on."""
    borders, queries = (0, 7000, 7500, TOKENS), 2000
    first, (q, k, v, do) = gradients_repeat(backend, borders, kv_heads=1, queries=queries)
    do[:-queries] = 0
    *_, dq, dk, dv = naive_attention(q, k, v, borders, 128**-0.5, do)
    for ours, exact in zip(first, (dq[-queries:], dk, dv)):
        assert relative_error(ours, exact) < 1e-2


def test_steps_of_two_runs_have_the_same_losses(tmp_path):
    flags = f"--bf16 --deterministic --context-parallel-size {GPUS} --global-batch-size {GPUS} --train-iters 5"
    (tmp_path / "again").mkdir()
    losses, output = train(tmp_path, GPUS, flags)
    again, _ = train(tmp_path / "again", GPUS, flags)
    assert losses == again and len(losses) == 5
    assert re.search(r"attention +(fa4|torch):", output), output
