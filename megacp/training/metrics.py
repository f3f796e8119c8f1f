"""What a step did and how fast: FLOPs by a stated convention, one record a step, three places to write it.

Worked example, llama3-8b on one stream of 8 tokens with documents of 3 and 5 tokens:

>>> from megacp.model.config import preset
>>> causal_pairs((0, 3, 8))  # 3*4/2 + 5*6/2
21
>>> attention_flops(preset("llama3-8b"), pairs=21)  # 4 * 32 heads * 128 channels * 21 pairs * 32 layers
11010048
>>> model_flops_per_step(preset("llama3-8b"), tokens=8, pairs=21)  # 6 * 7.50e9 weights * 8 tokens + 3 * attention
360256634880

`MetricsLogger` belongs to one rank. Its console line is for a person, TensorBoard for comparing runs, the JSON lines for
programs: one object a step, every step once, also across restarts; the first of each start tells the job's settings too
(`megacp.training.run_logs`). Evaluations have files of their own beside it:

>>> str(evaluation_log("runs/log.jsonl", "valid"))
'runs/log.valid.jsonl'
"""

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from megacp.memory.units import GIB
from megacp.model.config import ModelConfig
from megacp.training.position_loss import EvaluationRecord

RECORD_START = '{"step": '
EVALUATED_PARTS = {"valid": "eval", "test": "test"}  # how console and TensorBoard call them

# Dense bf16 peak, FLOP/s, from NVIDIA's data sheets. The PCIe and NVL cards of these names are slower and not listed.
PEAK_FLOPS = (
    (r"A100", 312e12),
    (r"H100(?!.*(PCIe|NVL))", 989e12),
    (r"H200(?!.*NVL)", 989e12),
    (r"B200", 2250e12),
)


def causal_pairs(cu_seqlens: Sequence[int]) -> int:
    """(query, key) pairs of causal attention inside each document: the sum of n(n+1)/2. An exact int at any length."""
    lengths = (int(stop) - int(start) for start, stop in itertools.pairwise(cu_seqlens))
    return sum(n * (n + 1) // 2 for n in lengths)


def attention_flops(config: ModelConfig, pairs: int) -> int:
    """Forward FLOPs of attention over all layers for `pairs` (query, key) pairs: q·k and p·v, 2 FLOPs per multiply-add."""
    return 4 * config.num_layers * config.num_attention_heads * config.kv_channels * pairs


def model_flops_per_step(config: ModelConfig, tokens: int, pairs: int) -> int:
    """Forward and backward FLOPs that the model needs for a batch of `tokens` with `pairs` causal pairs; recompute not counted.

    Backward counts twice the forward. An exact int: at 16M tokens of a 70B model it is past 2^63.
    """
    weights = config.num_layers * config.layer_matmul_parameters() + config.vocab_size * config.hidden_size
    return 6 * weights * tokens + 3 * attention_flops(config, pairs)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak, FLOP/s, of a GPU by the name that CUDA gives it. None when unknown: better no MFU than a wrong one."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(rf"\b{pattern}", device_name)), None)


def convention_text(peak: float | None, stated: bool = False) -> str:
    """How the throughput figures are counted, for the log's head. `stated`: by --device-peak-tflops."""
    if peak is None:
        against = "no MFU: the device's peak is not known, --device-peak-tflops can tell it"
    else:
        what = "as --device-peak-tflops says" if stated else "the device's dense bf16 peak"
        against = f"MFU against {peak / 1e12:,.4g} TFLOP/s, {what}"
    return (
        "model FLOPs: 6 x matmul weights x tokens (output head counted, embedding lookup not) + 12 x heads x head dim x layers "
        f"x sum of n(n+1)/2 over documents (causal, per document); recompute not counted; {against}"
    )


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One optimizer step. The fields but the last are the keys of the JSON lines."""

    step: int  # optimizer updates done, this one included: 1 is the first
    loss: float  # mean over the unmasked tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the global batch
    valid_tokens: int  # of these, the unmasked
    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # share of the device's peak, 0..1; None on a device without a known one
    peak_memory_gib: float | None  # allocated on this rank's device; None on a CPU
    phase_memory_gib: dict[str, float] | None = None  # the same by phase of the step; see memory_phases

    @classmethod
    def measured(
        cls,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        valid_tokens: int,
        step_time_s: float,
        model_flops: int,
        world_size: int,
        peak: float | None,
        peak_memory_bytes: int | None,
        phase_memory_bytes: dict[str, int] | None = None,
    ) -> "StepRecord":
        """From what the loop measures; `tokens` and `model_flops` are sums over the whole job, `peak` is one device's."""
        flops_per_gpu = model_flops / step_time_s / world_size
        phases = None if phase_memory_bytes is None else {name: bytes_ / GIB for name, bytes_ in phase_memory_bytes.items()}
        return cls(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            valid_tokens=valid_tokens,
            step_time_s=step_time_s,
            tokens_per_s_per_gpu=tokens / step_time_s / world_size,
            tflops_per_gpu=flops_per_gpu / 1e12,
            mfu=None if peak is None else flops_per_gpu / peak,
            peak_memory_gib=None if peak_memory_bytes is None else peak_memory_bytes / GIB,
            phase_memory_gib=phases,
        )

    def to_json(self, head: dict) -> str:
        """All but the phases, which are for TensorBoard; and then `head`."""
        return json_line({name: value for name, value in dataclasses.asdict(self).items() if name != "phase_memory_gib"} | head)


def json_line(values: dict) -> str:
    """One line of JSON. A number that JSON has no word for (nan, inf) becomes null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False)


def evaluation_log(jsonl: str | Path, part: str) -> Path:
    """Where the evaluations of a run that logs to `jsonl` go: one object each, with the keys step and loss too."""
    path = Path(jsonl)
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


class MetricsLogger:
    """Writes each StepRecord and EvaluationRecord to the console, and when asked to TensorBoard and to files of JSON lines.

    A log that cannot be written any more, because the disk is full, ends with a warning: the run is worth more than its logs.
    One that cannot be begun is refused with a ValueError that names the flag.

    `first_step` is the step of the first record to come. Records of it and later ones that a previous run left in `jsonl` and
    beside it are dropped, so that no step is there twice: this run takes those steps again. A run from the start goes on from
    none, so it moves the former files aside and says so; one that `branches` off another, which stays, keeps a copy aside. `head`:
    what the first record tells beside its own keys, such as the job that those up to the next head are of. `stream` None is
    standard output. Use as a context manager.
    """

    def __init__(
        self,
        train_iters: int,
        *,
        first_step: int = 1,
        branches: bool = False,
        log_interval: int = 1,
        tensorboard_dir: str | None = None,
        jsonl: str | None = None,
        device_type: str = "cuda",
        head: dict | None = None,
        stream: TextIO | None = None,
    ):
        self._head = head or {}
        self._train_iters = train_iters
        self._first_step = first_step
        self._log_interval = log_interval
        self._unit = "GPU" if device_type == "cuda" else "rank"
        self._stream = stream
        self._recent_times = deque(maxlen=20)  # seconds, for the ETA
        self._jsonl = self._tensorboard = None
        self._evaluation_paths = {}
        if jsonl is not None:
            path = Path(jsonl)
            with _refusing("--log-jsonl", jsonl):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._evaluation_paths = {part: evaluation_log(path, part) for part in EVALUATED_PARTS}
                files = [path, *self._evaluation_paths.values()]
                moved = move_aside(files) if first_step == 1 else copy_aside(files, first_step) if branches else []
                if moved:
                    what = "moved aside" if first_step == 1 else "kept aside, as this run takes some of its steps again"
                    print(f"--log-jsonl {jsonl}: of a former run, so {what}: {', '.join(map(str, moved))}", file=stream, flush=True)
                for file in files if first_step > 1 else ():
                    drop_steps_from(file, first_step)
                self._jsonl = path.open("a", encoding="utf-8")
        if tensorboard_dir is not None:
            with _refusing("--tensorboard-dir", tensorboard_dir):
                self._tensorboard = _summary_writer(tensorboard_dir, first_step)

    def log(self, record: StepRecord) -> None:
        self._recent_times.append(record.step_time_s)
        due = record.step % self._log_interval == 0
        if due or record.step in (self._first_step, self._train_iters):
            print(self._console_line(record), file=self._stream, flush=True)
        if self._tensorboard is not None:
            with self._giving_up_tensorboard(record.step):
                for name, value in dataclasses.asdict(record).items():
                    values = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
                    for tag, number in values.items():
                        if tag != "step" and number is not None:
                            self._tensorboard.add_scalar(tag, number, record.step)
        if self._jsonl is not None:
            with self._giving_up_jsonl(record.step):
                self._jsonl.write(record.to_json(self._head) + "\n")
                self._jsonl.flush()
                self._head = {}

    def log_evaluation(self, record: EvaluationRecord) -> None:
        name = EVALUATED_PARTS[record.part]
        print(self._evaluation_line(name, record), file=self._stream, flush=True)
        if self._tensorboard is not None:
            with self._giving_up_tensorboard(record.step):
                for key, loss in record.losses_by_key().items():
                    if loss is not None:
                        self._tensorboard.add_scalar(f"{name}/{key}", loss, record.step)
                self._tensorboard.flush()
        if self._jsonl is not None:
            with self._giving_up_jsonl(record.step), self._evaluation_paths[record.part].open("a", encoding="utf-8") as file:
                file.write(json_line(record.values()) + "\n")

    def lacks_evaluation(self, part: str, step: int) -> bool:
        """Whether `jsonl`'s file of this part tells nothing of the step; False without `jsonl`."""
        path = self._evaluation_paths.get(part)
        return path is not None and not (path.exists() and any(there == step for there, _ in _records(path)))

    def close(self) -> None:
        if self._tensorboard is not None:
            with self._giving_up_tensorboard("the last"):
                self._tensorboard.close()
        if self._jsonl is not None:
            with self._giving_up_jsonl("the last"):
                self._jsonl.close()

    @contextmanager
    def _giving_up_jsonl(self, step: int | str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn("--log-jsonl", step, error)
            with suppress(OSError):  # closing tries once more to write what is left, and closes in any case
                self._jsonl.close()
            self._jsonl = None

    @contextmanager
    def _giving_up_tensorboard(self, step: int | str) -> Iterator[None]:
        """TensorBoard writes from a thread of its own; what that raised comes here with a later call."""
        try:
            yield
        except OSError as error:
            self._warn("--tensorboard-dir", step, error)
            self._tensorboard = None

    def _warn(self, flag: str, step: int | str, error: OSError) -> None:
        text = f"warning: {flag}: {error} at step {step}: this log ends here, the run goes on without it"
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _console_line(self, record: StepRecord) -> str:
        width = len(str(self._train_iters))
        # The low median forgets the first step, which compiles and warms up, from the second on.
        left = max(0, self._train_iters - record.step) * statistics.median_low(self._recent_times)
        parts = [
            f"step {record.step:>{width}}/{self._train_iters}",
            f"loss {record.loss:8.4f}",
            f"grad norm {record.grad_norm:8.3f}",
            f"lr {record.lr:.2e}",
            f"{record.tokens_per_s_per_gpu:>9,.0f} tokens/s/{self._unit}",
            f"{record.tflops_per_gpu:8.4g} TFLOP/s/{self._unit}",
            None if record.mfu is None else f"MFU {100 * record.mfu:4.1f}%",
            f"{record.step_time_s:8.3f} s/step",
            None if record.peak_memory_gib is None else f"peak {record.peak_memory_gib:6.2f} GiB",
            f"ETA {duration_text(left)}",
        ]
        return " | ".join(part for part in parts if part is not None)


    def _evaluation_line(self, name: str, record: EvaluationRecord) -> str:
        width = len(str(self._train_iters))
        losses = {"loss": record.loss} | dict(zip(record.buckets, record.losses))
        parts = [f"{key} {'no labels' if loss is None else f'{loss:8.4f}'}" for key, loss in losses.items()]
        size = f"{sum(record.tokens):,} labels in {record.time_s:.3f} s"
        return " | ".join([f"{name} {record.step:>{width}}/{self._train_iters}", *parts, size])


@contextmanager
def _refusing(flag: str, place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {place} cannot be begun ({error}); another place works, or leave the flag out") from error


def duration_text(seconds: float) -> str:
    """Aligned: ' 0:00:42', '12:03:00', then '3d 04:00:00'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour:2}:{minute:02}:{second:02}"


def minutes_text(time: timedelta) -> str:
    """
    >>> minutes_text(timedelta(seconds=30)), minutes_text(timedelta(hours=24))
    ('0.5 min', '1,440 min')
    """
    minutes = time.total_seconds() / 60
    return f"{minutes:,.0f} min" if minutes >= 10 else f"{minutes:.2g} min"


def move_aside(logs: list[Path]) -> list[Path]:
    """Renames those of a run's files that hold something, with the first number that is free behind all of them: log.jsonl.1.

    Returns the new names. ValueError, and nothing is moved, when one of the files is no log.
    """
    kept = [path for path in logs if path.exists() and path.stat().st_size]
    for path in kept:
        _records(path)
    number = _free_number(logs)
    return [path.rename(_numbered(path, number)) for path in kept]


def copy_aside(logs: list[Path], first_step: int) -> list[Path]:
    """Copies those of a run's files that have records of `first_step` or later, named as by `move_aside`."""
    later = [path for path in logs if path.exists() and any(step >= first_step for step, _ in _records(path))]
    number = _free_number(logs)
    return [Path(shutil.copy2(path, _numbered(path, number))) for path in later]


def _free_number(logs: list[Path]) -> int:
    return next(n for n in itertools.count(1) if not any(_numbered(path, n).exists() for path in logs))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove the records of `first_step` and later from a file of JSON lines, if there is one. Complete or unchanged.

    ValueError, and nothing is written, when the file is no log.
    """
    if not path.exists():
        return
    kept = [line for step, line in _records(path) if step < first_step]
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _records(path: Path) -> list[tuple[int, str]]:
    """Steps and their lines. A last line without its end, which a killed run leaves, is left out. Any other line that is not a
    step record means the file is something else: ValueError.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n") and lines[-1].startswith(RECORD_START[: len(lines[-1])]):
        lines.pop()
    return [(_step_of(line, path, number), line) for number, line in enumerate(lines, 1)]


def _step_of(line: str, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"--log-jsonl {path}: line {number} is not a step record, so the file is left alone; a file of its own works"
        ) from None


def _summary_writer(directory: str, first_step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"--tensorboard-dir {directory} needs tensorboard: pip install tensorboard") from error
    return SummaryWriter(directory, purge_step=first_step)
