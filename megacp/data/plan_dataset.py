"""The sequences of a packing plan, shuffled by seed: what training reads when --data-path names a plan.

Worked example, a plan of 3 sequences, the order of seed 1234 in the first two epochs:

    sample                 0  1  2 | 3  4  5 | ...
    sequence of the plan   2  0  1 | 1  0  2 | ...

Within an epoch every sequence, and so every token of the plan, comes once. Sample i depends on (plan, seed, i) alone.
"""

import numpy as np

from megacp.data.indexed_dataset import DatasetError
from megacp.data.packing_plan import PackingPlan
from megacp.data.shuffle import permutation

_SHUFFLE_SEQUENCES = 1  # first word of the seed


class PlanDataset:
    """Same interface as PackedDataset, over the sequences [first, stop) of `plan`.

    Raises DatasetError when --seq-length is not the plan's, or the range is empty.
    """

    def __init__(self, plan: PackingPlan, sequence_range: tuple[int, int], seq_length: int, seed: int):
        if plan.seq_length != seq_length:
            raise DatasetError(
                f"--seq-length {seq_length}: {plan.folder} is packed for --seq-length {plan.seq_length}; train with that, or pack "
                f"again with tools/pack_documents.py --seq-length {seq_length}"
            )
        self._first, stop = sequence_range
        self._num_sequences = stop - self._first
        if self._num_sequences < 1:
            raise DatasetError(f"{plan.folder}: no sequence from {self._first} to {stop}; the plan has {len(plan)}")
        self.plan, self.seq_length, self._seed = plan, seq_length, seed
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Sequences per epoch. Sample i is in epoch i // len."""
        return self._num_sequences

    def sequence(self, i: int) -> int:
        """The sequence of the plan that sample i is."""
        epoch, served = divmod(i, self._num_sequences)
        if epoch not in self._orders:
            if len(self._orders) == 2:  # a micro-batch may lie across two epochs: keep both orders
                del self._orders[min(self._orders)]
            self._orders[epoch] = permutation(self._num_sequences, self._seed, (_SHUFFLE_SEQUENCES, epoch))
        return self._first + int(self._orders[epoch][served])

    def source(self, i: int) -> str:
        """The plan and the sequence of sample i, for messages."""
        return f"{self.plan.folder}, sequence {self.sequence(i)}"

    def document_borders(self, i: int) -> np.ndarray:
        """As PackedDataset.document_borders; padding is parted into short documents."""
        return self.plan.borders(self.sequence(i))

    def tokens(self, i: int, start: int, stop: int) -> np.ndarray:
        """As PackedDataset.tokens."""
        return self.plan.tokens(self.sequence(i), start, stop)

    def label_count(self, i: int) -> int:
        """Tokens of sequence i, from its first on, that have a label; what follows is padding."""
        return self.plan.label_count(self.sequence(i))
