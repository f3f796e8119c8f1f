"""dk and dv of query chunks are summed in fp32, on one rank as on several: chunks smaller by far do not make them worse."""

import pytest
import torch

from megacp.context_parallel.engine import AttentionSettings, stages_backward, stages_forward
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents
from megacp.memory.shelves import DeviceBlocks, DeviceStages

TOKENS, HEAD_DIM, CHUNKS = 512, 16, 64


def kv_gradients(dtype, query_chunk):
    """dk and dv of one head of one rank, whose values make every chunk add its part."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, TOKENS, 1, HEAD_DIM, generator=generator).bfloat16().to(dtype) for _ in range(4))
    settings = AttentionSettings(build_head_schedule(1, 1, 1, 1), None, Documents((0, TOKENS)), 0.25, "reference", query_chunk)
    outputs = DeviceStages(1, torch.empty(1, TOKENS, 1, HEAD_DIM, dtype=dtype, device="meta"), torch.device("cpu"))
    lse = DeviceBlocks()

    def turn(gradients, chunk):
        return [] if chunk is None else [q[:, chunk.start : chunk.stop].contiguous(), *((k, v) if chunk.brings_kv else ())]

    stages_forward(settings, turn, outputs, lse)
    last = stages_backward(settings, turn, lambda stage, start, stop: do[:, start:stop].contiguous(), outputs, lse)
    return last[-1].dk_CTmD, last[-1].dv_CTmD


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_many_chunks_are_as_near_to_float64_as_one(name):
    exact, whole, chunked = (
        kv_gradients(dtype, chunk)[("dk", "dv").index(name)].double()
        for dtype, chunk in ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, TOKENS // CHUNKS))
    )
    error = [((ours - exact).norm() / exact.norm()).item() for ours in (whole, chunked)]
    # Each chunk's part is rounded to bf16 once, which averages out; a sum in bf16 would round anew at each of 64 chunks.
    assert error[1] < 1.5 * error[0]
