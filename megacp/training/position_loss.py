"""The loss by how much context a token has: the figure that tells whether a long context is used at all.

The position of a token is the number of earlier tokens that its attention reaches: those of its document, or with
`--attention-mask causal` those of its sequence. (Its place in the sequence would not tell: the document around token 900,000 may
have begun ten tokens before.) Buckets grow fourfold: 0-32K, 32K-128K, 128K-512K, ... until one holds the last token of a sequence.

Worked example, a first bucket of 2, a rank that holds tokens 4 to 8 of a stream with documents of 3 and 6 tokens:

>>> places_T = context_lengths((0, 3, 9), first=4, tokens=5)
>>> places_T.tolist()
[1, 2, 3, 4, 5]
>>> bounds = bucket_bounds(9, first=2)
>>> bounds, bucket_names(bounds)
((0, 2, 8, 32), ('0-2', '2-8', '8-32'))
>>> labels_T = torch.tensor([7, -100, 7, 7, 7])
>>> bucket_sums(torch.tensor([0.5, 0.0, 1.0, 2.0, 3.0]), labels_T, places_T, bounds).tolist()  # losses, labels
[[0.5, 1.0], [6.0, 3.0], [0.0, 0.0]]

Later buckets hold long documents only. So compare a bucket with itself, over steps, runs or models; a difference between two
buckets is also one between documents.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from megacp.kernels.cross_entropy import IGNORE_INDEX

FIRST_BUCKET, BUCKET_GROWTH = 2**15, 4
UNITS = ((2**20, "M"), (2**10, "K"))


def bucket_bounds(seq_length: int, first: int = FIRST_BUCKET) -> tuple[int, ...]:
    """Borders of the buckets that the positions of a sequence need: bucket b holds [bounds[b], bounds[b + 1]).

    >>> bucket_bounds(5 * 2**20)
    (0, 32768, 131072, 524288, 2097152, 8388608)
    """
    bounds = [0, first]
    while bounds[-1] < seq_length:
        bounds.append(bounds[-1] * BUCKET_GROWTH)
    return tuple(bounds)


def bucket_names(bounds: tuple[int, ...]) -> tuple[str, ...]:
    """
    >>> bucket_names((0, 32768, 131072, 2097152))
    ('0-32K', '32K-128K', '128K-2M')
    """

    def text(tokens: int) -> str:
        unit, letter = next(((unit, letter) for unit, letter in UNITS if tokens and tokens % unit == 0), (1, ""))
        return f"{tokens // unit}{letter}"

    return tuple(f"{text(start)}-{text(stop)}" for start, stop in itertools.pairwise(bounds))


def context_lengths(cu_seqlens: tuple[int, ...], first: int, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Position of each token [first, first + tokens) of a stream with attention borders `cu_seqlens`: int64 `[tokens]`."""
    borders = torch.tensor(cu_seqlens, device=device)
    places_T = torch.arange(first, first + tokens, device=device)
    return places_T - borders[torch.searchsorted(borders, places_T, right=True) - 1]


def bucket_sums(loss_T: Tensor, labels_T: Tensor, places_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Summed loss and count of the unmasked labels of each bucket: float64 `[buckets, 2]`, exact counts, no rounding to fp32."""
    sums = torch.zeros(len(bounds) - 1, 2, dtype=torch.float64, device=loss_T.device)
    labelled_T = labels_T != IGNORE_INDEX
    for bucket, (start, stop) in enumerate(itertools.pairwise(bounds)):
        mine_T = labelled_T & (places_T >= start) & (places_T < stop)
        sums[bucket, 0] = loss_T.masked_fill(~mine_T, 0).sum(dtype=torch.float64)
        sums[bucket, 1] = mine_T.sum()
    return sums


@dataclass(frozen=True)
class EvaluationRecord:
    """What an evaluation found. `losses` and `tokens` have an entry a bucket; the loss of a bucket without labels is None."""

    step: int  # optimizer updates done
    part: str  # "valid" or "test"
    buckets: tuple[str, ...]
    losses: tuple[float | None, ...]  # mean over the bucket's unmasked tokens, nats
    tokens: tuple[int, ...]  # unmasked
    loss: float | None  # mean over all unmasked tokens
    time_s: float

    @classmethod
    def of_sums(cls, step: int, part: str, bounds: tuple[int, ...], sums: Tensor, time_s: float) -> "EvaluationRecord":
        """`sums`: of the whole job, as `bucket_sums` gives them."""
        losses, tokens = sums[:, 0].tolist(), [int(count) for count in sums[:, 1].tolist()]
        means = tuple(loss / count if count else None for loss, count in zip(losses, tokens))
        mean = sum(losses) / sum(tokens) if any(tokens) else None
        return cls(step, part, bucket_names(bounds), means, tuple(tokens), mean, time_s)

    def losses_by_key(self) -> dict[str, float | None]:
        """{"loss": 2.31, "loss_0_32k": 2.4, "loss_32k_128k": 2.2}"""
        return {"loss": self.loss} | {f"loss_{_key(bucket)}": loss for bucket, loss in zip(self.buckets, self.losses)}

    def values(self) -> dict[str, float | int | None]:
        """The keys of a JSON line: the losses and, for each, the unmasked tokens that it is the mean over."""
        tokens = {f"tokens_{_key(bucket)}": count for bucket, count in zip(self.buckets, self.tokens)}
        return {"step": self.step} | self.losses_by_key() | {"valid_tokens": sum(self.tokens)} | tokens | {"time_s": self.time_s}


def _key(bucket: str) -> str:
    return bucket.replace("-", "_").lower()
