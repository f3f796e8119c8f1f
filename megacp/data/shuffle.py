"""A permutation that depends on the seed alone: not on the numpy version, the platform or the rank.

    >>> permutation(5, seed=1234, words=(0,)).tolist()      # the same list on every machine
    [1, 2, 0, 3, 4]

numpy promises a stable stream for its bit generators and for SeedSequence, but not for Generator.permutation (NEP 19). So
the order here is the sort order of raw Philox words: a resumed job sees the same data after an upgrade.
"""

import numpy as np


def permutation(count: int, seed: int, words: tuple[int, ...]) -> np.ndarray:
    """int64 [count], a permutation of 0..count-1 drawn from `seed` and `words` (what is shuffled, which epoch; each >= 0).

    Takes 16 bytes of memory per element while it is made.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, *words])).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)
