"""With --recompute-granularity none the backward makes no matrix product of the forward again, and the device keeps their results."""

import pytest
import torch

from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.memory.policy import PLANS, plan_of
from megacp.model.config import preset
from megacp.planner import Job, count_layer

LLAMA = preset("llama3-8b")
TOKENS, HIDDEN, WIDTH, QUERIES, KEYS = 8192, 4096, 14336, 32 * 128, 8 * 128


@pytest.mark.parametrize("heads_per_stage, query_chunk, prefetch", [(8, None, 0), (32, None, 1), (8, 2048, 0)])
def test_products_saved_and_bytes_kept_by_hand(heads_per_stage, query_chunk, prefetch):
    schedule = build_head_schedule(32, 8, 8, heads_per_stage)
    job = Job(LLAMA, schedule, TOKENS, 8, 2048, 2048, torch.bfloat16, query_chunk)
    again = count_layer(job, plan_of("gpu", "selective", prefetch))
    never = count_layer(job, plan_of("gpu", "none", prefetch))
    forward, backward = (sum(x.gemm_flops.values()) for x in (again.forward_work, again.backward_work))
    assert sum(never.forward_work.gemm_flops.values()) == forward
    weights = HIDDEN * (QUERIES + 2 * KEYS) + QUERIES * HIDDEN + 2 * HIDDEN * WIDTH  # q, k, v; output; gate and up
    assert sum(never.backward_work.gemm_flops.values()) == backward - 2 * TOKENS * weights
    assert never.backward_work.attention_forward == again.backward_work.attention_forward
    kept = 2 * TOKENS * (QUERIES + 2 * KEYS + HIDDEN + 2 * WIDTH)  # q, k, v; h_mid; gate and up, bf16
    assert never.kept - again.kept == kept


@pytest.mark.parametrize("memory", [name for name in PLANS if name != "gpu"])
def test_products_stay_where_everything_is(memory):
    with pytest.raises(ValueError, match="on the device"):
        plan_of(memory, "none")
