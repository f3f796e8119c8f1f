"""Run a function on several ranks from a test, gloo processes on CPUs or NCCL processes with a GPU each.

    def total(rank, world_size, value):
        x = torch.tensor([value * (rank + 1)])
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert run_distributed(total, 4, 10) == [100, 100, 100, 100]

The function must be importable by name (defined at the top of a module), its arguments and results picklable.
Each call gets fresh processes, forked from a server that has imported torch and done nothing else: four ranks
start in about 0.1 s instead of the 2 s and more of importing torch in each, and forking is safe because the
server has no threads and no autograd engine.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

SECONDS_FOR_OTHER_FAILURES = 0.5
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_server = multiprocessing.get_context("forkserver")
# What the ranks import anyway; torch's compiler is among it because the first step under FSDP2 loads it, used or not.
_server.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "pytest"])


class RankFailure(AssertionError):
    """A rank raised, died, or did not finish in time; the message holds its traceback."""


def run_distributed(fn, world_size: int, *args, timeout: float = 120, backend: str = "gloo") -> list:
    """Returns `[fn(rank, world_size, *args) for rank in range(world_size)]`, each rank a process; with `backend` nccl it has a GPU.

    The first rank that fails ends the others and the call, which raises RankFailure with the rank's traceback.
    So does running longer than `timeout` seconds.
    """
    __tracebackhide__ = True  # pytest shows the rank's traceback, not this function
    ranks, processes = start_ranks(fn, world_size, *args, timeout=timeout, backend=backend)
    results = [None] * world_size
    failures = []
    deadline = time.monotonic() + timeout
    try:
        while ranks:
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    failures.append(
                        f"ranks {sorted(ranks.values())} of {world_size} did not finish within {timeout} s; "
                        "where they hung is in the captured stderr"
                    )
                break
            for receiver in ready:
                rank = ranks.pop(receiver)
                try:
                    succeeded, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    processes[rank].join()
                    succeeded, value = False, f"died with exit code {processes[rank].exitcode}"
                if succeeded:
                    results[rank] = value
                    continue
                if not failures:  # the others' errors often follow from the first, or are the cause: show those near it
                    deadline = min(deadline, time.monotonic() + SECONDS_FOR_OTHER_FAILURES)
                failures.append(f"rank {rank} of {world_size} {value}")
        if failures:
            raise RankFailure("\n".join(failures))
        for process in processes:
            process.join(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return results


def start_ranks(
    fn, world_size: int, *args, timeout: float = 120, backend: str = "gloo"
) -> tuple[dict[Connection, int], list[BaseProcess]]:
    """The ranks of `run_distributed` left to the caller, who may kill them: pipes that each rank closes at its end, and processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = pickle.dumps((fn, args))
    ranks, processes = {}, []
    with _SingleThreadedEnvironment():
        for rank in range(world_size):
            receiver, sender = _server.Pipe(duplex=False)
            process = _server.Process(
                target=_rank_main, args=(sender, rank, world_size, store.port, payload, timeout, backend), daemon=True
            )
            process.start()
            process.store = store  # lives as long
            sender.close()  # so that the end of the process closes the pipe
            ranks[receiver] = rank
            processes.append(process)
    return ranks, processes


class _SingleThreadedEnvironment:
    """Started here, the server and so the ranks use one thread each; the test process keeps its own settings."""

    def __enter__(self):
        self.before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)

    def __exit__(self, *_):
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(sender, rank: int, world_size: int, port: int, payload: bytes, timeout: float, backend: str) -> None:
    faulthandler.dump_traceback_later(0.9 * timeout, file=sys.__stderr__)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        fn, args = pickle.loads(payload)
        report = pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException:  # SystemExit and KeyboardInterrupt of a rank are the test's business too
        sender.send_bytes(pickle.dumps((False, f"failed:\n{traceback.format_exc()}")))
        sender.close()
        os._exit(1)  # without the clean-up that would wait for the other ranks
    sender.send_bytes(report)
    sender.close()
    if dist.is_initialized():  # the function may have ended it to make its own
        dist.destroy_process_group()
