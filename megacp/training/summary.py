"""What a run is, before it runs: model, layout, batch, memory and data on a few lines.

    model      llama-tiny, 3.8 million parameters: 4 layers, d 256, F 768, 8 heads / 4 KV heads of 32, vocabulary 4,096, tied
    layout     2 ranks = context 2 x data 1; upipe, 2 of 8 heads a stage, 4 stages; fp32 on cpu
    …
"""

import argparse
from datetime import timedelta

import torch

from megacp.data.dataset import SequenceDataset
from megacp.memory.policy import LayerPlan
from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.parallel_state import ParallelLayout
from megacp.planner import Job, predict, table
from megacp.training.metrics import convention_text, minutes_text, model_flops_per_step
from megacp.training.training_data import TrainingData

# What a step is assumed to reach when only its order of magnitude matters (time limits): a share of the peak. A CPU's is what one
# core may give; a GPU that is not known is taken for a slow one, below L4 (121 TFLOP/s) and H20 (148): a limit may be too long.
ASSUMED_SHARE_OF_PEAK = 0.3
ASSUMED_CPU_FLOPS = 5e9  # reached, not peak
ASSUMED_GPU_PEAK_FLOPS = 1e14


def startup_summary(
    args: argparse.Namespace, layout: ParallelLayout, job: Job, plans: list[LayerPlan], device: torch.device, peak: float | None,
    data: TrainingData, timeout: timedelta, notes: list[str],
) -> str:  # fmt: skip
    """The lines printed at start; `notes` come last, each as a warning. `peak`: of the device, FLOP/s, for MFU."""
    config, schedule = job.config, job.schedule
    context, data_size = layout.context_parallel_size, layout.data_parallel_size
    tied = "untied" if config.untie_embeddings_and_output_weights else "tied"
    accumulation = args.global_batch_size // (args.micro_batch_size * data_size)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    memory = predict(job, plans)
    parts = ", ".join(f"{part} {bytes_ / GIB:.2f}" for part, bytes_ in memory.parts.items())
    elsewhere = "".join(
        f"; on the {place} {bytes_ / GIB:.2f} GiB" for place, bytes_ in (("host", memory.host_bytes), ("disk", memory.disk_bytes)) if bytes_
    )
    lines = {
        "model": f"{config.name}, {config.parameter_count() / 1e6:,.1f} million parameters: {config.num_layers} layers, "
        f"d {config.hidden_size}, F {config.ffn_hidden_size}, {config.num_attention_heads} heads / {config.num_query_groups} KV "
        f"heads of {config.kv_channels}, vocabulary {config.vocab_size:,}, {tied}",
        "layout": f"{layout.world_size} ranks = context {context} x data {data_size}; {args.cp_comm_type}, "
        f"{schedule.heads_per_stage} of {schedule.num_heads} heads a stage, {len(schedule.stages)} stages; "
        f"{str(job.dtype).removeprefix('torch.')} on {name}",
        "batch": f"{args.global_batch_size} sequences of {args.seq_length:,} tokens a step, {job.tokens:,} tokens a rank at a "
        f"time, {accumulation} accumulated; attention mask {args.attention_mask}",
        "memory": f"predicted peak per rank {memory.device_bytes / GIB:.2f} GiB: {parts}{elsewhere}",
        **({"optimizer": optimizer_summary(job)} if job.states_on_host else {}),
        "plan": f"\n{'':10} ".join(table(plans)),
        "data": data.description,
        **({"evaluation": evaluation_summary(args, data)} if args.eval_interval else {}),
        **({"checkpoint": checkpoint_summary(args)} if args.save else {}),
        "timeout": f"{minutes_text(timeout)} for a collective",
        "counting": convention_text(peak, stated=args.device_peak_tflops is not None),
    }
    return "\n".join([f"{key:10} {text}" for key, text in lines.items()] + [f"{'note':10} {note}" for note in notes])


def optimizer_summary(job: Job) -> str:
    gib = job.host_state_bytes / GIB
    return f"AdamW in host memory: {gib:.2f} GiB of fp32 weights, moments and gradients (--optimizer-cpu-offload)"


def checkpoint_summary(args: argparse.Namespace) -> str:
    """Says what is deleted, which other trainers keep."""
    often = f"every {args.save_interval} steps and " if args.save_interval else ""
    kept = "the last one" if args.ckpt_keep == 1 else f"the last {args.ckpt_keep}"
    return f"{often}at the end in {args.save}, {kept} kept (--ckpt-keep)"


def evaluation_summary(args: argparse.Namespace, data: TrainingData) -> str:
    """What is evaluated when; whether sequences are too few for that."""
    samples = args.eval_iters * args.global_batch_size

    def share(part: SequenceDataset) -> str:
        again = ", so some come again" if samples > len(part) else ""
        return f"{samples:,} sequences of {len(part):,}{again}"

    test = f"test at the end, {share(data.test)}" if data.test else f"no test: {data.without_test}"
    return f"every {args.eval_interval} steps and at the end, {share(data.valid)}; {test}"


def predicted_step_seconds(
    args: argparse.Namespace, config: ModelConfig, layout: ParallelLayout, peak: float | None, device: torch.device
) -> float:
    """A rough, pessimistic step time: whole sequences without document borders at a low share of the peak, FLOP/s, if known."""
    pairs = args.seq_length * (args.seq_length + 1) // 2
    flops = model_flops_per_step(config, args.global_batch_size * args.seq_length, args.global_batch_size * pairs)
    if peak is None and device.type == "cuda":
        peak = ASSUMED_GPU_PEAK_FLOPS
    rate = ASSUMED_CPU_FLOPS if peak is None else ASSUMED_SHARE_OF_PEAK * peak
    return flops / layout.world_size / rate
