"""One process at a time: a lock that ends with the process that holds it, however that ends.

    file = lock_file(Path("runs/a/.lock"))  # Locked("process 71 on node3") while another process holds it
    file.close()                            # or the process ends

The lock is the kernel's; what is written in the file tells people whose it is. The file stays, unless who holds it removes it
before closing. A file system without locks (some of Lustre, object stores) has none: then nothing is locked.
"""

import errno
import fcntl
import os
import socket
from io import TextIOWrapper
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Locked(Exception):
    """Another process holds the lock: which one."""


def lock_file(path: Path) -> TextIOWrapper | None:
    """Makes and locks the file. None: the file system has no locks. Raises Locked."""
    while True:
        file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                break
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another run"
            file.close()
            raise Locked(holder) from None
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
