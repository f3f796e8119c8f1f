"""The random generators' states, as bytes in a checkpoint.

    state_u8 = random_state()          # uint8 tensor, about 20 KB
    restore_random_state(state_u8)     # python, numpy, torch on the CPU and on this rank's GPU draw on from there

Training draws nothing at random after the weights are made (there is no dropout, and the data order is a function
of the seed), so these states change no result. They are kept so that what a user adds goes on where it stopped.
"""

import json
import random

import numpy as np
import torch


def random_state() -> torch.Tensor:
    """This process's states; the GPU's only if the process uses one."""
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached_gaussian],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore_random_state(state_u8: torch.Tensor) -> None:
    """A state saved without a GPU leaves the GPU's generator alone."""
    state = json.loads(state_u8.numpy().tobytes())
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


def seed_random_state(seed: int, iteration: int, rank: int) -> None:
    """Seeds all generators from the three numbers: streams that differ by rank and repeat no former iteration."""
    mixed = np.random.SeedSequence([seed, iteration, rank]).generate_state(4)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    torch.manual_seed(int(mixed[2]) << 32 | int(mixed[3]))
