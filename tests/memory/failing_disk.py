"""A training run whose disk fails on one rank: torchrun … failing_disk.py FAULT RANK STEP FLAGS…

FAULT: "write" for an I/O error of the RANK's disk, "flip" for one changed bit in what it reads, both from the first
transfer after optimizer step STEP. Prints the unix time of each fault on a line of its own.
"""

import errno
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_llama
from megacp.training.loop import TrainingRun


def report() -> None:
    os.write(sys.stdout.fileno(), f"\nfault at {time.time()}\n".encode())  # one write: several threads report at once


def break_disk(fault: str) -> None:
    def failing(*_):
        report()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    read = os.preadv

    def flipping(fd, parts, position):
        count = read(fd, parts, position)
        report()
        parts[0][count // 2] ^= 1
        return count

    if fault == "write":
        os.pwrite = failing
    else:
        os.preadv = flipping


def main() -> int:
    fault, rank, step, *flags = sys.argv[1:]
    original = TrainingRun._step

    def take_step(run):
        if run.iteration == int(step) and os.environ["RANK"] == rank:
            break_disk(fault)
        return original(run)

    TrainingRun._step = take_step
    sys.argv = ["pretrain_llama.py", *flags]
    return pretrain_llama.main()


if __name__ == "__main__":
    sys.exit(main())
