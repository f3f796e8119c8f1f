"""One optimizer step: micro-batches forward and backward, gradients, clipping, update.

    settings = step_settings(args, config, layout, schedule, device, dtype)
    result = train_step(model, optimizer, micro_batches, settings, device, dtype, before_update)
    result.loss, result.grad_norm                   # the mean over the unmasked tokens of the global batch; global L2 norm

The loss of every micro-batch on every rank is divided by one number, the unmasked labels of the whole global batch, and gradients are
summed. So neither layout nor accumulation nor where the masked tokens lie changes a result: a rank that holds only masked tokens
adds zeros.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megacp import parallel_state
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.data.batch import PackedBatch
from megacp.kernels.attention import BackendChoice, Documents, select_backend
from megacp.kernels.rotary import attention_factor, inverse_frequencies
from megacp.memory.store import ActivationStore
from megacp.model.config import ModelConfig
from megacp.model.layer_context import LayerContext
from megacp.model.llama import Llama
from megacp.parallel_state import ParallelLayout
from megacp.training.activation_plans import activation_plans, memory_job
from megacp.training.metrics import causal_pairs
from megacp.training.optimizer import clip_grad_norm


@dataclass(frozen=True)
class StepSettings:
    """What a step needs besides model and data. Tile sizes in tokens; `clip_grad` 0 measures the norm only."""

    config: ModelConfig
    schedule: HeadSchedule
    store: ActivationStore
    attention_backend: str
    query_chunk: int | None
    mlp_tile_size: int
    loss_tile_size: int
    clip_grad: float
    deterministic: bool = False


def step_settings(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, schedule: HeadSchedule, device: torch.device,
    dtype: torch.dtype, store_type: type[ActivationStore] = ActivationStore,
) -> StepSettings:  # fmt: skip
    """The settings that the flags name; takes the activation store's memory. Raises ValueError when host or disk cannot give it."""
    job = memory_job(args, config, layout, schedule, dtype)
    store = store_type(activation_plans(args, job, device), job.geometry, device, args.disk_offload_dir)
    return StepSettings(
        config, schedule, store, args.attention_backend, args.upipe_query_chunk, args.mlp_tile_size, args.loss_tile_size,
        args.clip_grad, args.deterministic,
    )  # fmt: skip


@dataclass(frozen=True)
class StepResult:
    """Equal on all ranks but for `backend`, the choice for this rank's last micro-batch.

    `valid_tokens`: unmasked labels of the global batch; `attention_pairs`: its (query, key) pairs, causal inside each document.
    """

    loss: float
    grad_norm: float
    valid_tokens: int
    attention_pairs: int
    backend: BackendChoice


def train_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[PackedBatch],
    settings: StepSettings,
    device: torch.device,
    dtype: torch.dtype,
    before_update: Callable[[float, float], None],
) -> StepResult:
    """Runs one step. `before_update(loss, grad_norm)` is called with the weights still untouched; if it raises, they stay so."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    valid_tokens, attention_pairs = _count(group, micro_batches, device)
    grad_scale = 1.0 / max(1, valid_tokens)  # a batch without a single label has loss 0 and gradients 0

    loss = torch.zeros((), dtype=torch.float64, device=device)
    for batch in micro_batches:
        context, backend = layer_context(batch, settings, device, dtype)
        tokens_T, labels_T = batch.tokens_T.to(device), batch.labels_T.to(device)
        micro_loss = model(tokens_T, labels_T, context, grad_scale, settings.loss_tile_size)
        micro_loss.backward()
        loss += micro_loss.detach()
    dist.all_reduce(loss, group=group)
    mean_loss = loss.item()
    grad_norm = clip_grad_norm(model, settings.clip_grad)
    before_update(mean_loss, grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, grad_norm, valid_tokens, attention_pairs, backend)


def layer_context(
    batch: PackedBatch, settings: StepSettings, device: torch.device, dtype: torch.dtype
) -> tuple[LayerContext, BackendChoice]:
    """The context all layers of a micro-batch share, with the attention backend chosen for its documents."""
    config, schedule = settings.config, settings.schedule
    documents = Documents(batch.cu_seqlens)
    q_heads, kv_heads = widest_attention_call(schedule)
    backend = select_backend(
        settings.attention_backend, device, dtype, config.kv_channels, q_heads, kv_heads, documents,
        query_chunks=settings.query_chunk is not None, deterministic=settings.deterministic,
    )  # fmt: skip
    attention = AttentionSettings(
        schedule, parallel_state.get_ulysses_group(), documents, config.kv_channels**-0.5, backend.name, settings.query_chunk,
        deterministic=settings.deterministic,
    )  # fmt: skip
    inv_freq_D2 = inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling, device)
    position_ids_T = batch.position_ids_T.to(device)
    factor = attention_factor(config.rope_scaling)
    return LayerContext(attention, position_ids_T, inv_freq_D2, factor, settings.mlp_tile_size, settings.store), backend


def widest_attention_call(schedule: HeadSchedule) -> tuple[int, int]:
    """Query and KV heads of the largest attention call that a stage makes on one rank."""
    runs = [run for stage in schedule.stages for run in stage.runs]
    return max((run.q_count, run.kv_count) for run in runs)


def _count(group: dist.ProcessGroup, micro_batches: list[PackedBatch], device: torch.device) -> tuple[int, int]:
    """Unmasked labels and attention pairs of the global batch. A stream's pairs are counted once, by its first context rank."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for batch in micro_batches:
        counts[0] += batch.valid_tokens
        if parallel_state.get_context_parallel_rank() == 0:
            counts[1] += causal_pairs(batch.cu_seqlens)
    dist.all_reduce(counts, group=group)
    return tuple(counts.tolist())
