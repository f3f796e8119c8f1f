"""What a run is, before it runs: model, layout, batch, memory and data on a few lines.

    model      llama-tiny, 3.8 million parameters: 4 layers, d 256, F 768, 8 heads / 4 KV heads of 32, vocabulary 4,096, tied
    layout     2 ranks = context 2 x data 1; upipe, 2 of 8 heads a stage, 4 stages; fp32 on cpu
    …
"""

import argparse
from datetime import timedelta

import torch

from megacp.context_parallel.head_schedule import HeadSchedule
from megacp.data.dataset import SequenceDataset
from megacp.memory.estimate import GIB, estimate_memory
from megacp.model.config import ModelConfig
from megacp.parallel_state import ParallelLayout
from megacp.training.metrics import convention_text, model_flops_per_step, peak_flops
from megacp.training.training_data import TrainingData

# Model FLOP/s that a step is assumed to reach when only its order of magnitude matters (time limits).
ASSUMED_SHARE_OF_PEAK = 0.3
ASSUMED_CPU_FLOPS = 5e9


def startup_summary(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, schedule: HeadSchedule, device: torch.device,
    dtype: torch.dtype, data: TrainingData, timeout: timedelta, notes: list[str],
) -> str:  # fmt: skip
    """The lines printed at start; `notes` come last, each as a warning."""
    context, data_size = layout.context_parallel_size, layout.data_parallel_size
    tokens_per_rank = args.seq_length * args.micro_batch_size // context
    tied = "untied" if config.untie_embeddings_and_output_weights else "tied"
    accumulation = args.global_batch_size // (args.micro_batch_size * data_size)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name) if device.type == "cuda" else None
    memory = estimate_memory(
        config, schedule, tokens_per_rank, layout.world_size, dtype.itemsize, args.mlp_tile_size, args.loss_tile_size
    )
    parts = ", ".join(f"{part.replace('_', ' ')} {bytes_ / GIB:.2f}" for part, bytes_ in vars(memory).items())
    lines = {
        "model": f"{config.name}, {config.parameter_count() / 1e6:,.1f} million parameters: {config.num_layers} layers, "
        f"d {config.hidden_size}, F {config.ffn_hidden_size}, {config.num_attention_heads} heads / {config.num_query_groups} KV "
        f"heads of {config.kv_channels}, vocabulary {config.vocab_size:,}, {tied}",
        "layout": f"{layout.world_size} ranks = context {context} x data {data_size}; {args.cp_comm_type}, "
        f"{schedule.heads_per_stage} of {schedule.num_heads} heads a stage, {len(schedule.stages)} stages; "
        f"{str(dtype).removeprefix('torch.')} on {name}",
        "batch": f"{args.global_batch_size} sequences of {args.seq_length:,} tokens a step, {tokens_per_rank:,} tokens a rank at a "
        f"time, {accumulation} accumulated; attention mask {args.attention_mask}",
        "memory": f"predicted per rank {memory.total / GIB:.2f} GiB: {parts}",
        "data": data.description,
        **({"evaluation": evaluation_summary(args, data)} if args.eval_interval else {}),
        "timeout": f"{timeout.total_seconds() / 60:.0f} min for a collective",
        "counting": convention_text(peak),
    }
    return "\n".join([f"{key:10} {text}" for key, text in lines.items()] + [f"{'note':10} {note}" for note in notes])


def evaluation_summary(args: argparse.Namespace, data: TrainingData) -> str:
    """What is evaluated when; whether sequences are too few for that."""
    samples = args.eval_iters * args.global_batch_size

    def share(part: SequenceDataset) -> str:
        again = ", so some come again" if samples > len(part) else ""
        return f"{samples:,} sequences of {len(part):,}{again}"

    test = f"test at the end, {share(data.test)}" if data.test else f"no test: {data.without_test}"
    return f"every {args.eval_interval} steps and at the end, {share(data.valid)}; {test}"


def predicted_step_seconds(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, peak: float | None
) -> float:
    """A rough, pessimistic step time: whole sequences without document borders at a low share of the peak."""
    pairs = args.seq_length * (args.seq_length + 1) // 2
    flops = model_flops_per_step(config, args.global_batch_size * args.seq_length, args.global_batch_size * pairs)
    rate = ASSUMED_SHARE_OF_PEAK * peak if peak else ASSUMED_CPU_FLOPS
    return flops / layout.world_size / rate
