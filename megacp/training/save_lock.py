"""One run at a time saves into a folder: two would remove each other's checkpoints in the making, and replace each other's last.

    lock = lock_save(Path("runs/a"))        # the first rank; held until the process ends, however it ends
    lock.close()                            # or until then

The lock is the kernel's, on `runs/a/.lock`, which tells for people whose it is; the file stays when the run has ended. A run that is
ending has its time to do so: the next of a queue often begins while the last one's processes are still there. A file system without
locks (some of Lustre, object stores) has none: then nothing is locked.
"""

import errno
import fcntl
import os
import socket
import time
from io import TextIOWrapper
from pathlib import Path

from megacp.argument_checks import ArgumentError

NAME = ".lock"
WAIT_S, POLL_S = 60.0, 0.5
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def lock_save(directory: Path, wait_s: float = WAIT_S) -> TextIOWrapper | None:
    """Locks the folder, which is made when it is not there. None: the file system has no locks.

    Raises ArgumentError naming --save and the other run when that is still there after `wait_s`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    deadline, told = time.monotonic() + wait_s, False
    while True:
        file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                break
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "another run"
            if time.monotonic() > deadline:
                raise ArgumentError(
                    f"--save {directory} is being saved into by {other}; another folder works. If that run is no more, on a host that "
                    f"is gone: rm {path}"
                ) from None
            if not told:
                print(f"waiting up to {wait_s:.0f} s for {other}, which saves into --save {directory}", flush=True)
                told = True
            time.sleep(POLL_S)
        except OSError as error:
            file.close()
            if error.errno in NO_LOCKS:
                return None
            raise
        file.close()
    file.truncate(0)
    job = os.environ.get("SLURM_JOB_ID")
    file.write(f"process {os.getpid()} on {socket.gethostname()}{f', slurm job {job}' if job else ''}\n")
    file.flush()
    return file


def _is_at(path: Path, file: TextIOWrapper) -> bool:
    """Whether the file that was locked is still the one with the name: somebody may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
