"""Evaluation: the loss of held-out data, as a whole and by how much context a token has.

    evaluator = Evaluator(args, config, settings, model, data, device, dtype)
    record = evaluator.evaluate("valid", step=100, interrupted=lambda: False)
    record.loss, dict(zip(record.buckets, record.losses))          # 2.31, {"0-32K": 2.4, "32K-128K": 2.2, ...}

The forward of training, without gradients, on the first --eval-iters x --global-batch-size samples of the part: the same at every
evaluation, on every layout. Losses are summed over all ranks in float64 and divided by the unmasked tokens.

Training does not notice: evaluation has a data position of its own, draws no random numbers, and leaves weights, optimizer and the
activation store as they are. Its layers keep nothing for a backward, so whatever --activation-memory says, a layer's input, output
and attention output on the device (3 u) are all that there is at a time.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from megacp import parallel_state
from megacp.memory.policy import LayerPlan
from megacp.memory.store import ActivationStore
from megacp.model.config import ModelConfig
from megacp.model.llama import Llama
from megacp.training.micro_batches import read_micro_batches
from megacp.training.position_loss import EvaluationRecord, bucket_bounds, bucket_sums, context_lengths
from megacp.training.step import StepSettings, layer_context
from megacp.training.training_data import TrainingData


class Evaluator:
    """Every rank holds one and calls it at the same steps. `settings`, `device`, `dtype`: those of training."""

    def __init__(
        self, args: argparse.Namespace, config: ModelConfig, settings: StepSettings, model: Llama, data: TrainingData,
        device: torch.device, dtype: torch.dtype,
    ):  # fmt: skip
        keeps_nothing = ActivationStore([LayerPlan()] * config.num_layers, settings.store.geometry, device)
        self._args, self._config, self._settings = args, config, replace(settings, store=keeps_nothing)
        self._model, self._data, self._device, self._dtype = model, data, device, dtype
        self.bounds = bucket_bounds(args.seq_length)

    @property
    def has_test(self) -> bool:
        return self._data.test is not None

    def evaluate(self, part: str, step: int, interrupted: Callable[[], bool]) -> EvaluationRecord | None:
        """Evaluates `part` ("valid" or "test"). The record is the same on all ranks.

        `interrupted()` is asked before each global batch, by all ranks; once it is true the evaluation ends without a record.
        Raises DatasetError, on all ranks, when one of them cannot read its part.
        """
        start = time.perf_counter()
        dataset = getattr(self._data, part)
        sums = torch.zeros(len(self.bounds) - 1, 2, dtype=torch.float64, device=self._device)
        try:
            for number in range(self._args.eval_iters):
                if interrupted():
                    return None
                first = number * self._args.global_batch_size
                for batch in read_micro_batches(dataset, first, self._args, self._config.vocab_size, self._data.eod):
                    context, _ = layer_context(batch, self._settings, self._device, self._dtype)
                    labels_T = batch.labels_T.to(self._device)
                    loss_T = self._model.token_losses(
                        batch.tokens_T.to(self._device), labels_T, context, self._settings.loss_tile_size
                    )
                    first_token = parallel_state.get_context_parallel_rank() * len(labels_T)
                    places_T = context_lengths(batch.cu_seqlens, first_token, len(labels_T), self._device)
                    sums += bucket_sums(loss_T, labels_T, places_T, self.bounds)
        finally:
            self._model.reshard()  # the root unit stays gathered for a backward, which does not come
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return EvaluationRecord.of_sums(step, part, self.bounds, sums, time.perf_counter() - start)
