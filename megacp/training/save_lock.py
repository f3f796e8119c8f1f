"""One run at a time saves into a folder: two would remove each other's checkpoints in the making, and replace each other's last.

    lock = lock_save(Path("runs/a"))        # the first rank; held until the process ends, however it ends
    lock.close()                            # or until then

The lock is on `runs/a/.lock`; the file stays when the run has ended. A run that is ending has its time to do so: the next of a
queue often begins while the last one's processes are still there.
"""

import time
from io import TextIOWrapper
from pathlib import Path

from megacp.argument_checks import ArgumentError
from megacp.file_lock import Locked, lock_file

NAME = ".lock"
WAIT_S, POLL_S = 60.0, 0.5


def lock_save(directory: Path, wait_s: float = WAIT_S) -> TextIOWrapper | None:
    """Locks the folder, which is made when it is not there. None: the file system has no locks.

    Raises ArgumentError naming --save and the other run when that is still there after `wait_s`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            return lock_file(path)
        except Locked as other:
            if time.monotonic() > deadline:
                raise ArgumentError(
                    f"--save {directory} is being saved into by {other}; another folder works. If that run is no more, on a host that "
                    f"is gone: rm {path}"
                ) from None
            if not told:
                print(f"waiting up to {wait_s:.0f} s for {other}, which saves into --save {directory}", flush=True)
                told = True
            time.sleep(POLL_S)
