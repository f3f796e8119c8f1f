"""Documents packed into sequences of exactly `seq_length` tokens, shuffled by seed.

Worked example: documents of 3, 0 and 6 tokens, A B C and P Q R S T U, seq_length 4, an epoch that draws the order P.. A..

    stream of the epoch   P Q R S T U A B C        9 tokens
    sequence 0            P Q R S | T              4 tokens and the label of the last
    sequence 1                    T U A B | C
    left out                              C        9 - 2 * 4 = 1 token, only ever a label in this epoch

    document_borders      sequence 0: 0 4          sequence 1: 0 2 4      (T U continues a document, A B begins one)

An epoch holds (tokens - 1) // seq_length sequences, so that each has the label of its last token; `tokens_left_out` states
the rest, 1 to seq_length tokens, other ones in each epoch. The sequences of an epoch are shuffled too. Nothing is copied:
building takes memory for the documents (and 8 bytes a sequence), and a read touches only the tokens asked for.
"""

from dataclasses import dataclass

import numpy as np

from megacp.data.indexed_dataset import DatasetError, IndexedDataset
from megacp.data.shuffle import permutation

_SHUFFLE_DOCUMENTS, _SHUFFLE_SEQUENCES = 0, 1  # first word of the seed: the two orders of an epoch are independent


@dataclass(frozen=True)
class _Epoch:
    documents: np.ndarray  # int64 [documents]: non-empty documents in the order of this epoch
    starts: np.ndarray  # int64 [documents + 1]: where each begins in the epoch's stream of tokens
    sequences: np.ndarray  # int64 [sequences]: the order in which the sequences are served


class PackedDataset:
    """Sequences of `seq_length` tokens from documents [document_range[0], document_range[1]) of `indexed`.

    `empty_documents` counts the documents without tokens (skipped), `tokens_left_out` the tokens of an epoch that fill no
    sequence. Raises DatasetError when the documents do not fill one sequence.
    """

    def __init__(self, indexed: IndexedDataset, document_range: tuple[int, int], seq_length: int, seed: int):
        first, stop = document_range
        lengths = indexed.document_lengths[first:stop]
        self._indexed, self._seed, self.seq_length = indexed, seed, seq_length
        self._documents = first + np.flatnonzero(lengths)
        self._lengths = lengths[lengths > 0]
        self.empty_documents = len(lengths) - len(self._lengths)
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self._num_sequences = (self.num_tokens - 1) // seq_length
        if self._num_sequences < 1:
            raise DatasetError(
                f"{indexed.prefix}: documents {first} to {stop} hold {self.num_tokens} tokens, too few for one sequence of "
                f"--seq-length {seq_length} and its last label; {max(self.num_tokens - 1, 1)} or less fits, or give these "
                "documents a larger share with --split"
            )
        self.tokens_left_out = self.num_tokens - self._num_sequences * seq_length
        self._epochs: dict[int, _Epoch] = {}

    def __len__(self) -> int:
        """Sequences per epoch. Sample i is in epoch i // len."""
        return self._num_sequences

    def source(self, i: int) -> str:
        """The file that sample i comes from, for messages."""
        return str(self._indexed.bin_path)

    def document_borders(self, i: int) -> np.ndarray:
        """int64: 0, each place in sequence i where a document begins, seq_length. Rises strictly."""
        epoch, first = self._locate(i)
        low = np.searchsorted(epoch.starts, first, side="right")
        high = np.searchsorted(epoch.starts, first + self.seq_length, side="left")
        return np.concatenate([[0], epoch.starts[low:high] - first, [self.seq_length]]).astype(np.int64, copy=False)

    def tokens(self, i: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens [start, stop) of sequence i, 0 <= start <= stop <= seq_length + 1.

        Token seq_length is the one that follows the sequence, the label of its last token.
        """
        if not 0 <= start <= stop <= self.seq_length + 1:
            raise IndexError(f"tokens [{start}, {stop}) of a sequence of {self.seq_length} tokens and one label")
        epoch, first = self._locate(i)
        out = np.empty(stop - start, dtype=np.int64)
        filled, at = 0, first + start  # at: place in the epoch's stream
        position = int(np.searchsorted(epoch.starts, at, side="right")) - 1
        while filled < len(out):
            begin = at - int(epoch.starts[position])
            length = int(epoch.starts[position + 1] - epoch.starts[position])
            end = min(length, begin + len(out) - filled)
            out[filled : filled + end - begin] = self._indexed.read_document(int(epoch.documents[position]), begin, end)
            filled, at, position = filled + end - begin, at + end - begin, position + 1
        return out

    def label_count(self, i: int) -> int:
        """Tokens of sequence i, from its first on, that have a label: all."""
        return self.seq_length

    def _locate(self, i: int) -> tuple[_Epoch, int]:
        """The epoch of sample i and the place in its stream where the sequence begins."""
        number, served = divmod(i, self._num_sequences)
        if number not in self._epochs:
            if len(self._epochs) == 2:  # a micro-batch may lie across two epochs: keep both orders
                del self._epochs[min(self._epochs)]
            self._epochs[number] = self._shuffle(number)
        epoch = self._epochs[number]
        return epoch, int(epoch.sequences[served]) * self.seq_length

    def _shuffle(self, number: int) -> _Epoch:
        order = permutation(len(self._documents), self._seed, (_SHUFFLE_DOCUMENTS, number))
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self._lengths[order], out=starts[1:])
        sequences = permutation(self._num_sequences, self._seed, (_SHUFFLE_SEQUENCES, number))
        return _Epoch(self._documents[order], starts, sequences)
