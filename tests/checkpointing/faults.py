"""Failing and dying at a chosen file operation, for tests of what is written when.

    fault = FileFault()
    fault.arm(3, die)                          # the third operation from here on kills the process
    fault.arm(3, raise_no_space)               # or raises "No space left on device" instead of being done
    fault.arm(3, raise_no_space, for_good=True)  # and so does every later one
    ...
    fault.disarm()                             # True if it came to that

Operations are those that change a directory or open a file for writing. Python tells its audit hooks of each before
it is done, whoever does it: the code under test, torch or shutil. A process keeps its hooks, so use it in a child.
"""

import errno
import os
import signal
import sys

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FileFault:
    def __init__(self):
        self.action = None
        sys.addaudithook(self._observe)

    def arm(self, operation: int, action, for_good: bool = False) -> None:
        self.remaining, self.for_good, self.happened, self.action = operation, for_good, False, action

    def disarm(self) -> bool:
        self.action = None
        return self.happened

    def _observe(self, event: str, arguments: tuple) -> None:
        if self.action is None or not (event in CHANGES or event == "open" and self._is_write(*arguments)):
            return
        self.remaining -= 1
        if self.remaining == 0 or self.remaining < 0 and self.for_good:
            self.happened = True
            self.action()

    @staticmethod
    def _is_write(path, mode, flags) -> bool:
        return "iter_" in str(path) and bool(flags & (os.O_WRONLY | os.O_RDWR))
