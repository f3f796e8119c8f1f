"""A function over a stream of items by several processes, in order and with little in memory.

list(map_in_order(len, ["a", "bc"], workers=2))     -> [1, 2]
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megacp.data.indexed_dataset import DatasetError

TASKS_PER_WORKER = 4  # waiting, or done and not yet taken


def map_in_order(function: Callable, items: Iterable, workers: int) -> Iterator:
    """function(item) of each item, in order, over `workers` processes (1: this process), few items ahead.

    Ctrl-C stops the caller, not the workers, which end with it.
    Raises DatasetError when a process dies.
    """
    if workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        pending = deque()
        for item in items:
            if len(pending) == workers * TASKS_PER_WORKER:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DatasetError(f"a worker process died (out of memory?); fewer than --workers {workers} need less") from error
    finally:
        pool.shutdown(cancel_futures=True)
