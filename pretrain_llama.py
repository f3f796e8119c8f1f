#!/usr/bin/env python3
"""Pretrain a Llama- or Qwen3-style decoder on long packed sequences.

One node of 8 GPUs, a million tokens a sequence:

    torchrun --nproc-per-node 8 pretrain_llama.py --model llama3-8b --context-parallel-size 8 --seq-length 1048576 \\
        --data-path corpus --tokenizer-type HuggingFace --tokenizer-model tokenizer.json --train-iters 1000 \\
        --lr 2e-5 --save checkpoints --load checkpoints --tensorboard-dir runs/1m

From a pretrained Llama or Qwen3 in a Hugging Face folder, which gives the model: --load-hf Llama-3.1-8B instead of --model.

A laptop, to see it work (`bash examples/quickstart.sh` does the same on real text):

    torchrun --nproc-per-node 2 pretrain_llama.py --context-parallel-size 2 --mock-data --train-iters 20 --lr 1e-3

`--help` lists every flag. `--dry-run` checks a job of any size in one process, without its weights:

    WORLD_SIZE=64 python pretrain_llama.py --model llama3-70b --context-parallel-size 32 --mock-data --dry-run

One rank of such a job on one GPU, for its memory and time; the GPUs of the others are not needed:

    python pretrain_llama.py --rehearse-world-size 8 --rehearse-attention stub --model llama3-8b --context-parallel-size 8 \\
        --seq-length 10485760 --activation-memory lean --mock-data
"""

import os
import sys
import time
from pathlib import Path

import torch

from megacp import parallel_state
from megacp.argument_checks import check_vocab_size
from megacp.arguments import model_config_from_args, parse_args, resolve_precision, validate_args
from megacp.checkpointing.distributed import latest_iteration
from megacp.checkpointing.huggingface import HuggingFaceWeights
from megacp.checkpointing.random_state import seed_random_state
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.parallel_state import ParallelLayout
from megacp.rehearsal import rehearse
from megacp.training.activation_plans import activation_plans, check_budgets, memory_job, stages_note
from megacp.training.errors import explain_errors
from megacp.training.evaluation import Evaluator
from megacp.training.host_states import available_host_bytes, check_activations, prepare_host
from megacp.training.idle_layers import computing_layers
from megacp.training.initialize import check_launch, collective_timeout, initialize_distributed, launched_rank
from megacp.training.initialize import job_of, launcher_notes, limit_gpu_memory, limit_notes, select_device
from megacp.training.initialize import shut_down_distributed, use_deterministic_kernels
from megacp.training.loop import TrainingRun, device_peak_flops
from megacp.training.memory_phases import memory_history
from megacp.training.metrics import MetricsLogger
from megacp.training.optimizer import build_optimizer
from megacp.training.path_checks import begin_from_pretrained, check_logs, check_paths, place_to_resume
from megacp.training.peer_watch import PeerWatch
from megacp.training.run_logs import log_head
from megacp.training.save_lock import lock_save
from megacp.training.sharding import allocate_weights, build_model
from megacp.training.step import step_settings
from megacp.training.summary import predicted_step_seconds, startup_summary
from megacp.training.training_data import open_training_data
from megacp.training.watchers import step_watchers


def main() -> int:
    started = time.monotonic()
    args = parse_args()
    is_first_rank = os.environ.get("RANK", "0") == "0"  # what is no number is refused below
    with explain_errors(is_first_rank) as outcome:
        world_size, rank = job_of(args)
        notes = validate_args(args, world_size)
        config = model_config_from_args(args)
        device = select_device(args.device)
        limit_gpu_memory(args.gpu_memory_limit_gib, device)
        dtype = resolve_precision(args, device)
        if args.deterministic:
            use_deterministic_kernels()
        begin_from_pretrained(args)
        check_paths(args)
        if is_first_rank:
            check_logs(args)
        data = open_training_data(args, config)
        check_vocab_size(config, data.vocab_size)
        check_launch(alone=args.dry_run or bool(args.rehearse_world_size))
        resuming = args.load is not None and latest_iteration(args.load) is not None
        pretrained = HuggingFaceWeights(args.load_hf, config) if args.load_hf and not resuming else None

        layout = ParallelLayout(world_size, args.context_parallel_size)
        schedule = build_head_schedule(
            config.num_attention_heads, config.num_query_groups, layout.ulysses_degree, args.upipe_heads_per_stage
        )
        job = memory_job(args, config, layout, schedule, dtype)
        plans = activation_plans(args, job, device)
        check_budgets(args, plans, job)
        computing = computing_layers(job, plans, args.rehearse_layers, device)
        if not args.dry_run:
            own_room = list(dict.fromkeys(plans)) if args.rehearse_world_size else plans  # rehearsed layers of one plan share it
            check_activations(job, own_room, args.activation_memory, available_host_bytes())
            if args.optimizer_cpu_offload and device.type == "cuda":
                prepare_host(job, own_room, available_host_bytes())
        peak = device_peak_flops(device, args.device_peak_tflops)
        step_seconds = predicted_step_seconds(args, config, layout, peak, device)
        timeout = collective_timeout(args.distributed_timeout_minutes, step_seconds)
        notes += launcher_notes(step_seconds)
        if not args.dry_run and not args.rehearse_world_size:
            notes += limit_notes(args.gpu_memory_limit_gib, device)
        notes += filter(None, [stages_note(args, job, plans, device)])
        if is_first_rank:
            print(startup_summary(args, layout, job, plans, device, peak, data, timeout, notes), flush=True)
        faked = args.dry_run or args.rehearse_world_size
        if args.save and is_first_rank and not faked:
            lock = lock_save(Path(args.save))  # noqa: F841, held to the end
            check_paths(args)  # again: another run may have saved while it was waited for
        initialize_distributed(layout, device, timeout, fake_rank=rank if faked else None)
        model = build_model(config, parallel_state.get_data_context_mesh(), dtype, args.optimizer_cpu_offload)
        with memory_history(args.record_memory_history if is_first_rank else None, device):
            if args.dry_run:
                print(f"dry run, rank {rank} of {layout.world_size}: all but the weights was built, nothing was trained")
            elif args.rehearse_world_size:
                print(rehearse(args, config, layout, schedule, model, device, dtype, data, computing).table(), flush=True)
            else:
                with PeerWatch(timeout=timeout) as peers:
                    train(args, config, layout, schedule, model, device, dtype, data, pretrained, is_first_rank, peers, started)
        shut_down_distributed()
    return outcome.exit_code


def train(args, config, layout, schedule, model, device, dtype, data, pretrained, is_first_rank, peers, started) -> None:
    settings = step_settings(args, config, layout, schedule, device, dtype)
    seed_random_state(args.seed, 0, launched_rank())
    allocate_weights(model, device, args.seed, pretrained, args.optimizer_cpu_offload)
    optimizer = build_optimizer(
        model, lr=args.lr, weight_decay=args.weight_decay, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps
    )
    evaluator = Evaluator(args, config, settings, model, data, device, dtype) if args.eval_interval else None
    with step_watchers(args, model, optimizer, device, console=is_first_rank) as watchers:
        watchers = [peers, *watchers]
        run = TrainingRun(
            args, config, settings, model, optimizer, data.train, data.eod, device, dtype, evaluator, watchers=watchers,
            started=started, data_fingerprint=data.fingerprint() if is_first_rank and (args.save or args.load) else None,
        )  # fmt: skip
        peers.checkpoint = lambda: place_to_resume(args) if run.can_go_on else None
        for line in run.resume():
            if is_first_rank:
                print(line, flush=True)
        if not is_first_rank:
            run.train(None)
            return
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        accumulation = args.global_batch_size // (args.micro_batch_size * layout.data_parallel_size)
        head = log_head(memory_job(args, config, layout, schedule, dtype), settings.store.plans, accumulation, name, args)
        with MetricsLogger(
            args.train_iters, first_step=run.iteration + 1, branches=run.branches, log_interval=args.log_interval,
            tensorboard_dir=args.tensorboard_dir, jsonl=args.log_jsonl, device_type=device.type, head=head,
        ) as logger:  # fmt: skip
            run.train(logger)


if __name__ == "__main__":
    sys.exit(main())
