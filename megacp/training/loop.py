"""The training loop: data, step, log, save, and a clean end on a signal or where --exit-interval, --exit-duration-in-mins say so.

    run = TrainingRun(args, config, settings, model, optimizer, dataset, eod, device, dtype)
    run.resume()                    # from --load, if there is a checkpoint
    run.train(logger)               # to --train-iters, or to the end of the step in which SIGTERM came

The position in the data is one number, `consumed_samples`, whatever the layout. `iteration` counts finished steps; a
checkpoint is the state between two steps. Evaluations, too, are between two steps, after the checkpoint.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megacp import parallel_state
from megacp.checkpointing.agreement import agreement_group, together
from megacp.checkpointing.distributed import CheckpointError, latest_iteration, load_checkpoint, save_checkpoint
from megacp.checkpointing.weights import config_to_json
from megacp.data.batch import PackedBatch
from megacp.data.dataset import SequenceDataset
from megacp.data.indexed_dataset import DatasetError
from megacp.model.config import ModelConfig
from megacp.model.llama import Llama
from megacp.training.evaluation import Evaluator
from megacp.training.metrics import MetricsLogger, StepRecord, model_flops_per_step, peak_flops
from megacp.training.micro_batches import read_micro_batches
from megacp.training.path_checks import abandoned_steps, place_to_resume, same_place
from megacp.training.resilience import TerminationSignal, check_finite
from megacp.training.memory_phases import CudaGauge, PhaseMeter
from megacp.training.schedule import learning_rate
from megacp.training.step import StepResult, StepSettings, train_step

# What a position in the data means. A checkpoint carries them; a run that changes one of them reads other samples.
DATA_IDENTITY = ("data_path", "train_data_path", "mock_data", "split", "seq_length", "seed")
DATA_USE = ("attention_mask", "reset_position_ids", "eod_mask_loss")  # what is made of the samples
HEADS = ("num_attention_heads", "num_query_groups", "kv_channels")  # weights of the same shapes may be of other heads


class StepWatcher(Protocol):
    """Told of every step: a profiler, a display of progress."""

    def start_step(self, step: int, batches: list[PackedBatch]) -> None: ...  # `batches`: this rank's micro-batches
    def finish_step(self) -> None: ...  # all of the step's work is enqueued; not called for a step that failed


@dataclass
class TrainingRun:
    """A model in training and its place in the run. Every rank holds one."""

    args: argparse.Namespace
    config: ModelConfig
    settings: StepSettings
    model: Llama
    optimizer: torch.optim.Optimizer
    dataset: SequenceDataset
    eod: int | None
    device: torch.device
    dtype: torch.dtype
    evaluator: Evaluator | None = None  # every --eval-interval steps
    meter: PhaseMeter | None = None  # of the device's memory; on a GPU there always is one
    watchers: Sequence[StepWatcher] = ()
    data_fingerprint: str | None = None  # of what --data-path or --train-data-path holds; None: not asked for, as of mock data
    started: float = field(default_factory=time.monotonic)  # of time.monotonic(), for --exit-duration-in-mins
    iteration: int = 0
    consumed_samples: int = 0
    saved_iteration: int = 0  # the last one that a checkpoint holds
    can_go_on: bool = False  # --save holds a checkpoint of this run, or the one that it goes on from
    abandoned: list[int] = field(default_factory=list)  # steps in --save after that of --ckpt-step, which this run takes again
    attention_backend: str = ""  # of the last step; depends on its documents

    def __post_init__(self):
        if self.meter is None and self.device.type == "cuda":
            self.meter = PhaseMeter(self.model, CudaGauge(self.device))

    @property
    def branches(self) -> bool:
        """Whether it goes on from a checkpoint that stays another run's: it saves elsewhere, not at all, or from an older step."""
        return self.iteration > 0 and not self.can_go_on

    def resume(self) -> list[str]:
        """Continues from the checkpoint in --load, if there is one, or takes its weights. Returns lines that say what happened."""
        args, directory = self.args, self.args.load
        if directory is None:
            return []
        self._check_same_start()
        if latest_iteration(directory) is None:
            start = f"the weights of --load-hf {args.load_hf}" if args.load_hf else "initial weights"
            return [f"--load {directory} holds no checkpoint: starting from {start}"]
        optimizer = None if args.finetune or args.no_load_optim else self.optimizer
        state = load_checkpoint(directory, self.model, optimizer, args.ckpt_step, generators=not args.finetune)
        changes = self._model_changes(state.get("model_config", {}))
        if args.finetune:
            flag = "--pretrained-checkpoint" if args.pretrained_checkpoint else "--finetune"
            weights = f"the weights of {directory}, step {state['iteration']}"
            return [f"loaded {weights}; this run starts at step 0 ({flag})", *changes]
        self.iteration, self.consumed_samples = state["iteration"], state["consumed_samples"]
        self.saved_iteration = self.iteration
        saves_there = args.save is not None and same_place(Path(directory), Path(args.save))
        # With flags that must not be given again a checkpoint of its own has to come first.
        self.can_go_on = saves_there and place_to_resume(args) == args.save
        moments = "; AdamW's moments start at zero (--no-load-optim)" if args.no_load_optim else ""
        lines = [f"loaded {directory}, step {self.iteration}, {self.consumed_samples:,} samples consumed{moments}"]
        if self.iteration >= args.train_iters:
            more = self.iteration + args.train_iters
            lines.append(f"nothing left to train: --train-iters {args.train_iters} is reached; --train-iters {more}, say, goes on")
        if left := abandoned_steps(args):
            self.abandoned = left
            later = f"warning: later checkpoints are left behind (step {', '.join(map(str, left))})"
            lines.append(f"{later}; --ckpt-keep {args.ckpt_keep} deletes them before others as this run saves")
        lines += [f"warning: {change}" for change in changes]
        return lines + [f"warning: {change}" for change in self._data_changes(state)]

    def _data_changes(self, state: dict) -> list[str]:
        """In what this run's data differs from that of the checkpoint. Converted weights have seen none."""
        there = f"the run goes on at sample {self.consumed_samples:,} of other data"
        flags = {name: "--" + name.replace("_", "-") for name in (*DATA_IDENTITY, *DATA_USE)}
        before = state.get("data", {})
        changed = {name: (old, getattr(self.args, name)) for name, old in before.items() if old != getattr(self.args, name)}
        lines = [f"{flags[name]} was {old}, is {new}: {there}" for name, (old, new) in changed.items() if name in DATA_IDENTITY]
        fingerprints = {state.get("data_fingerprint"), self.data_fingerprint}
        if len(fingerprints) == 2 and None not in fingerprints and not lines:
            name = "train_data_path" if self.args.train_data_path else "data_path"
            path = " ".join(getattr(self.args, name))
            lines.append(f"{flags[name]} {path} does not hold what it held when the checkpoint was saved: {there}")
        return lines + [f"{flags[name]} was {old}, is {new} from here on" for name, (old, new) in changed.items() if name in DATA_USE]

    def _check_same_start(self) -> None:
        """Raises CheckpointError on all ranks when they do not find the same in --load, as where it is a disk of each host's own."""
        newest = latest_iteration(self.args.load)
        start = f"no checkpoint in {self.args.load}" if newest is None else f"step {newest} in {self.args.load}"
        with agreement_group() as group:
            starts = together(group, lambda: start)
        other = next((rank for rank, found in enumerate(starts) if found != starts[0]), None)
        if other is not None:
            raise CheckpointError(
                f"--load: rank 0 finds {starts[0]}, rank {other} finds {starts[other]}; a folder that all hosts share works"
            )

    def _model_changes(self, saved: dict) -> list[str]:
        """How this run uses weights of the same shapes in another way. Raises CheckpointError when they mean something else."""
        lines = []
        for name, now in config_to_json(self.config).items():
            before = saved.get(name, now)
            if before != now and name in HEADS:
                flag = "--" + name.replace("_", "-")
                raise CheckpointError(f"--load {self.args.load} is of a model with {flag} {before}; {flag} {now} does not fit it")
            if before != now and name not in ("name", "init_method_std"):
                lines.append(f"the model of the checkpoint has {name} {before}, this run has {now}")
        return lines

    def train(self, logger: MetricsLogger | None) -> None:
        """Trains to --train-iters. `logger` is rank 0's; None elsewhere. A signal, or the end of the time that it may take, ends
        the run after the step with a checkpoint; so does --exit-interval, after the evaluations that are due.
        """
        args, ranks = self.args, parallel_state.get_data_parallel_group(with_context_parallel=True)
        minutes = args.exit_duration_in_mins or math.inf
        with TerminationSignal(self.started + 60 * minutes, f"--exit-duration-in-mins {minutes:g}") as termination:

            def interrupted() -> bool:
                return termination.received(ranks)

            self._evaluate(self._parts_owed(logger), logger, interrupted)  # once interrupted, the loop ends after a step as ever
            while self.iteration < args.train_iters:
                record = self._step()
                if logger is not None:
                    logger.log(record)
                stopping, leaving = interrupted(), self._due(args.exit_interval)
                saving = stopping or leaving or self.iteration == args.train_iters or self._due(args.save_interval)
                if args.save and saving:
                    self._save()
                if not stopping and self.evaluator is not None:
                    stopping = not self._evaluate(self._parts_due(), logger, interrupted)
                    if args.save and stopping and not saving:
                        self._save()
                if stopping or leaving and self.iteration < args.train_iters:
                    if dist.get_rank() == 0:
                        reason = termination.reason if stopping else f"--exit-interval {args.exit_interval}"
                        print(f"{reason}: stopped after step {self.iteration}, {self._way_on()}", flush=True)
                    return

    def _way_on(self) -> str:
        save = self.args.save
        return f"saved in {save}; --load {place_to_resume(self.args)} goes on from there" if save else "nothing saved: no --save"

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.iteration % interval == 0

    def _parts_due(self) -> list[str]:
        """What is evaluated after this step."""
        finished = self.iteration == self.args.train_iters
        parts = ["valid"] if finished or self._due(self.args.eval_interval) else []
        return parts + (["test"] if finished and self.evaluator.has_test else [])

    def _parts_owed(self, logger: MetricsLogger | None) -> list[str]:
        """Of a resumed run what the log lacks after the step that it goes on from: it stopped before, or in its evaluation."""
        due = self._parts_due() if self.evaluator is not None and self.can_go_on else []
        if not due:
            return []
        owed = [logger is not None and logger.lacks_evaluation(part, self.iteration) for part in due]
        owed = torch.tensor(owed, dtype=torch.int32, device=self.device)
        dist.broadcast(owed, src=0)  # the first rank has the log
        return [part for part, is_owed in zip(due, owed.tolist()) if is_owed]

    def _evaluate(self, parts: list[str], logger: MetricsLogger | None, interrupted: Callable[[], bool]) -> bool:
        """Evaluates these parts, if any. Returns whether that went to its end, not `interrupted`."""
        for part in parts:
            with self._saving_when_unreadable(f"evaluation on the {part} data after step {self.iteration} not finished"):
                record = self.evaluator.evaluate(part, self.iteration, interrupted)
            if record is None:
                return False
            if logger is not None:
                logger.log_evaluation(record)
        return True

    def _step(self) -> StepRecord:
        """One optimizer step on the next global batch."""
        args, start = self.args, time.perf_counter()
        if self.meter is not None:
            self.meter.start_step()
        batches = self._next_micro_batches()
        for watcher in self.watchers:
            watcher.start_step(self.iteration + 1, batches)
        rate = self._set_learning_rate()
        samples = range(self.consumed_samples, self.consumed_samples + args.global_batch_size)

        def check(loss: float, grad_norm: float) -> None:
            check_finite(loss, grad_norm, self.iteration + 1, self.consumed_samples, samples)
            if self.meter is not None:
                self.meter.mark("optimizer")

        result = train_step(self.model, self.optimizer, batches, self.settings, self.device, self.dtype, check)
        seconds = time.perf_counter() - start
        if self.meter is not None:
            self.meter.finish_step()
        for watcher in self.watchers:
            watcher.finish_step()
        if result.backend.name != self.attention_backend and dist.get_rank() == 0:
            print(f"{'attention':10} {result.backend.reason}", flush=True)
        self.attention_backend = result.backend.name
        self.iteration += 1
        self.consumed_samples += args.global_batch_size
        return self._record(result, rate, seconds)

    def _next_micro_batches(self) -> list[PackedBatch]:
        """This rank's tokens of the next global batch, one entry per accumulation step."""
        with self._saving_when_unreadable(f"step {self.iteration + 1} not begun"):
            return read_micro_batches(self.dataset, self.consumed_samples, self.args, self.config.vocab_size, self.eod)

    @contextmanager
    def _saving_when_unreadable(self, what: str) -> Iterator[None]:
        """Data that a rank could not read, which all ranks know of, ends the run with what was trained so far saved."""
        try:
            yield
        except DatasetError as error:
            if self.args.save and self.iteration > self.saved_iteration:
                self._save()
            saved = f"; {self._way_on()}" if self.can_go_on else ""
            raise DatasetError(f"{what}: {error}{saved}") from error

    def _set_learning_rate(self) -> float:
        args = self.args
        rate = learning_rate(
            self.iteration + 1, lr=args.lr, min_lr=args.min_lr, warmup_iters=args.lr_warmup_iters, decay_iters=args.lr_decay_iters,
            style=args.lr_decay_style, wsd_decay_iters=args.lr_wsd_decay_iters,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _save(self) -> None:
        state = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "model_config": config_to_json(self.config),
            "data": {name: getattr(self.args, name) for name in (*DATA_IDENTITY, *DATA_USE)},
            "data_fingerprint": self.data_fingerprint,
            "args": {name: value for name, value in vars(self.args).items() if not name.startswith("_")},
        }
        self.abandoned = [step for step in self.abandoned if step != self.iteration]  # it is this run's own now
        save_checkpoint(
            self.args.save, self.iteration, self.model, self.optimizer, state, keep=self.args.ckpt_keep, abandoned=self.abandoned
        )
        self.saved_iteration, self.can_go_on = self.iteration, True

    def _record(self, result: StepResult, rate: float, seconds: float) -> StepRecord:
        tokens = self.args.global_batch_size * self.args.seq_length
        phases = None if self.meter is None else {name: phase.peak for name, phase in self.meter.last_step.items()}
        return StepRecord.measured(
            step=self.iteration, loss=result.loss, grad_norm=result.grad_norm, lr=rate, tokens=tokens,
            valid_tokens=result.valid_tokens, step_time_s=seconds, world_size=dist.get_world_size(),
            model_flops=model_flops_per_step(self.config, tokens, result.attention_pairs),
            peak=device_peak_flops(self.device, self.args.device_peak_tflops),
            peak_memory_bytes=None if phases is None else max(phases.values()), phase_memory_bytes=phases,
        )  # fmt: skip


def device_peak_flops(device: torch.device, stated_tflops: float | None) -> float | None:
    """Dense peak of the device, FLOP/s: as stated, else of bf16; None on a CPU or an unknown GPU."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
