"""Notices that another rank or the launcher is gone, and ends this one with a message, whatever its main thread is waiting in.

    with PeerWatch(timeout=timeout) as peers:                        # by every rank, once the groups exist
        run = TrainingRun(..., watchers=[peers])
        peers.checkpoint = lambda: "ckpt" if run.can_go_on else None
        run.train(logger)

    [rank 0] error: rank 3 (host node-1, pid 4711) ended during step 12 without a word: it crashed, or was killed, …

| a rank                           | says to the others | they                                                                |
|----------------------------------|--------------------|---------------------------------------------------------------------|
| leaves the block                 | leaving            | go on without it                                                    |
| leaves the block by an exception | failing            | have GRACE_SECONDS to end by an error of their own, then end too    |
| has lost its launcher            | orphaned           | end at once                                                         |
| is gone                          | nothing            | end at once: the collectives of this step would wait for it in vain |
| is stopped                       | nothing            | say so, and go on: it may come back until a collective's time limit |

Each rank holds a TCP connection to rank 0, which passes on what it hears. The system closes the connections of a process that is
gone, however it went. A host that is gone, or cut off, is noticed within a minute: its system acknowledges neither rank 0's pings
(one every 15 s, each given 30 s) nor probes of an idle connection. A rank that computes, saves or is stopped for an hour is not
gone, as its system acknowledges for it: that it does not answer is told, and ends nothing. When a collective then times out, the
error names it. A rank whose main thread hangs answers still, and is not told from one that computes. A thread listens, and ends the
process itself: the main thread may be in a collective or wait for the GPU, and a launcher's SIGTERM would only make it wish to
finish the step.
"""

import os
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megacp.data.batch import PackedBatch
from megacp.training.metrics import minutes_text
from megacp.training.resilience import CollectiveTimeout

RUN_ERROR = 1  # exit code
GRACE_SECONDS = 5.0  # when ranks find the same error, each has its own to tell, and one of them the most telling
CAUSE_SECONDS = 1.0  # a failed collective may be heard of before the end of the peer that made it fail
HEARING_SECONDS = 0.2  # for others to hear of an end from rank 0, before they hear of rank 0's
GOODBYE_SECONDS = 2.0  # at most, for the others' ends of the connections to close
CONNECT_SECONDS, INTRODUCTION_SECONDS = 300.0, 10.0
LAUNCHER_SECONDS = 0.5  # between two looks whether the launcher lives
# Without an answer so long, as a call that compiles may take some, a rank is told to be quiet; at most a third of a time limit.
QUIET_SECONDS = 60.0
PINGS = 4  # in that time
MEETING_POINT = "rank 0 listens"
# Probes of an idle connection: after 10 s, every 5 s, gone after 4 without an answer. Linux sends none while something sent is not
# acknowledged, such as a ping, and then waits a quarter of an hour unless told how long (ms).
UNHEARD = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
LEAVING, FAILING, ORPHANED, ENDED, SILENT = ENDS = "leaving", "failing", "orphaned", "ended", "silent"
PING, HERE, QUIET, BACK = "ping", "here", "quiet", "back"
# What torch's errors say of collectives that another rank did not come to, or left.
TIMED_OUT = re.compile("tim(ed ?|e)out", re.IGNORECASE)
CUT_OFF = re.compile("connection|broken pipe|remote process|failed to recv", re.IGNORECASE)


@dataclass(frozen=True)
class Peer:
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class PeerWatch:
    """A context manager and a watcher of the training loop. Alone, a rank has only torchrun to watch, if that started it.

    `timeout`: of a collective. `checkpoint` tells for the message what --load could go on from, None when nothing was saved; it
    is called when a peer is gone, and its disk perhaps with it, so it must not look there. Raises ConnectionError when the ranks
    cannot reach rank 0, and, in place of torch's error, CollectiveTimeout for a collective that timed out in the block.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=10), checkpoint: Callable[[], str | None] = lambda: None):
        self._rank, self._where, self._timeout = dist.get_rank(), "before the first step", timeout
        self.checkpoint = checkpoint
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._said: set[int] = set()  # ranks that told of their end
        self._failed: tuple[int, float] | None = None  # the first rank that said so, and when this one must have ended
        self._failing = self._closing = False  # this rank
        self._close_by = 0.0
        self._cause_told = threading.Event()  # of the end of a peer, or of the launcher
        self._sending = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._quiet_after = min(QUIET_SECONDS, timeout.total_seconds() / 3)
        self._next_ping = time.monotonic()
        self._waited_for: dict[int, float] = {}  # since when: an answer of another rank (on rank 0), rank 0's next ping (on others)
        self._quiet: dict[int, float] = {}  # ranks that do not answer, since when
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeerWatch":
        if dist.get_world_size() > 1:
            self._peers, self._connections = _meet()
        elif self._launcher is None:
            return self
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for rank, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
        if self._rank != 0:
            self._waited_for[0] = time.monotonic()
        self._thread = threading.Thread(target=self._listen, name="peers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, _) -> None:
        if self._thread is None:
            return
        timed_out = False
        if kind is None:
            self._close_by, self._closing = time.monotonic() + GOODBYE_SECONDS, True
            self._say(LEAVING, self._rank)
            for connection in self._connections.values():
                _say_no_more(connection)
        else:
            of_a_collective = kind is RuntimeError or issubclass(kind, dist.DistError)
            timed_out = of_a_collective and TIMED_OUT.search(str(error)) is not None
            self._failing = True
            self._say(FAILING, self._rank)
            told = self._cause_told.wait(CAUSE_SECONDS)
            if of_a_collective and not told and self._failed is not None and CUT_OFF.search(str(error)):
                self._tell_of_failure(self._failed[0], f" (here: {str(error).splitlines()[0]})")
            if of_a_collective and self._cause_told.is_set():
                os._exit(RUN_ERROR)  # what made it fail was told; groups that miss a rank could hang while the interpreter ends
        self._closing = True
        self._wake.send(b"x")
        self._thread.join()
        for closed in (*self._connections.values(), self._wake, self._woken, self._selector):
            closed.close()
        if timed_out:
            raise CollectiveTimeout(self._timeout_text()) from error

    def start_step(self, step: int, batches: list[PackedBatch]) -> None:
        self._where = f"during step {step}"

    def finish_step(self) -> None:
        self._where = self._where.replace("during", "after")

    def _listen(self) -> None:
        while not self._closing or (len(self._selector.get_map()) > 1 and time.monotonic() < self._close_by):
            for key, _ in self._selector.select(self._patience()):
                if key.data is None:
                    key.fileobj.recv(1)
                else:
                    self._read(key.fileobj, *key.data)
            if self._failed is not None and not self._failing and time.monotonic() >= self._failed[1]:
                self._tell_of_failure(self._failed[0])
            if not self._closing:
                if self._orphaned():
                    self._end_orphaned()
                self._look_for_quiet_ranks()

    def _patience(self) -> float:
        if self._closing:
            return GOODBYE_SECONDS
        times = [self._quiet_after / PINGS, *([LAUNCHER_SECONDS] if self._launcher else [])]
        if self._failed is not None and not self._failing:
            times.append(max(0.0, self._failed[1] - time.monotonic()))
        return min(times)

    def _read(self, connection: socket.socket, rank: int, text: bytearray) -> None:
        end = ENDED
        try:
            received = connection.recv(4096)
        except ConnectionError:  # reset: as good as closed
            received = b""
        except OSError:  # timed out, or no route to the host
            received, end = b"", SILENT
        text += received
        while b"\n" in text:
            line, _, rest = text.partition(b"\n")
            text[:] = rest
            word, about = line.decode().split()
            self._hear(word, int(about))
        if not received:
            self._selector.unregister(connection)
            if rank not in self._said and not self._closing:  # a connection also ends as the answer to this rank's leaving
                self._hear(end, rank)

    def _hear(self, word: str, rank: int) -> None:
        if word in ENDS:
            self._hear_of_end(word, rank)
        elif word == PING:
            self._waited_for[0] = time.monotonic()
            self._say(HERE, self._rank)
        elif word == HERE:
            self._waited_for.pop(rank, None)
        elif word == QUIET and rank != self._rank:
            self._quiet[rank] = time.monotonic() - self._quiet_after
        elif word == BACK:
            self._quiet.pop(rank, None)

    def _hear_of_end(self, word: str, rank: int) -> None:
        self._said.add(rank)
        self._waited_for.pop(rank, None)
        if word == LEAVING:
            _say_no_more(self._connections[rank])
        if self._rank == 0 and word != LEAVING:
            self._say(word, rank)
        if word == FAILING and self._failed is None:
            self._failed = rank, time.monotonic() + GRACE_SECONDS
        elif word == ORPHANED:
            self._end(rank, "as its launcher was gone")
        elif word == ENDED:
            self._end(rank, "without a word: it crashed, or was killed, as for want of host memory")
        elif word == SILENT:
            self._end(rank, "or its host is gone: no answer for half a minute")

    def _look_for_quiet_ranks(self) -> None:
        """Rank 0 asks the others one by one, again when they have answered; they take its question as its sign of life."""
        now = time.monotonic()
        if now < self._next_ping:
            return
        if now - self._next_ping > self._quiet_after / 2:  # this rank was stopped itself: what it did not hear is nobody's fault
            self._waited_for = dict.fromkeys(self._waited_for, now)
        self._next_ping = now + self._quiet_after / PINGS
        for rank in set(self._connections) - self._said:
            since = self._waited_for.get(rank)
            if since is not None and now - since >= self._quiet_after:
                if rank not in self._quiet:
                    self._quiet[rank] = since
                    self._warn(rank, f"has not answered for {self._quiet_after:.0f} s: it is stopped, or hangs. If it does not go "
                               f"on, a collective times out after {minutes_text(self._timeout)}")  # fmt: skip
                    self._pass_on(QUIET, rank)
            elif since is None or self._rank != 0:
                if rank in self._quiet:
                    self._warn(rank, f"answers again, after {now - self._quiet.pop(rank):.0f} s")
                    self._pass_on(BACK, rank)
                if self._rank == 0:
                    self._waited_for[rank] = now
                    self._send(rank, PING, 0)

    def _warn(self, rank: int, text: str) -> None:
        """By rank 0, or of it by the next."""
        if self._rank == 0 or self._rank == 1:
            os.write(2, f"[rank {self._rank}] warning: {self._where}: {self._peers[rank]} {text}\n".encode())

    def _pass_on(self, word: str, rank: int) -> None:
        if self._rank == 0:
            self._say(word, rank)

    def _say(self, word: str, rank: int) -> None:
        """To rank 0, or from it to all but `rank`."""
        for other in self._connections:
            if other != rank:
                self._send(other, word, rank)

    def _send(self, to: int, word: str, rank: int) -> None:
        with self._sending, suppress(OSError):  # whoever is gone is noticed by listening
            self._connections[to].sendall(f"{word} {rank}\n".encode())

    def _tell_of_failure(self, rank: int, here: str = "") -> None:
        self._end(rank, f"with an error of its own, which it printed{here}")

    def _end(self, rank: int, how: str) -> None:
        if self._orphaned():
            self._end_orphaned()
        quiet = f"; {self._quiet_text()}" if self._quiet.keys() - {rank} else ""
        self._end_saying(f"{self._peers[rank]} ended {self._where} {how}{quiet}; this rank ends too")

    def _orphaned(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _end_orphaned(self) -> None:
        self._say(ORPHANED, self._rank)
        self._end_saying(f"the launcher (torchrun, pid {self._launcher}) is gone, {self._where}: without it no rank could save what "
                         "it trains from here on; this rank ends")  # fmt: skip

    def _end_saying(self, text: str) -> None:
        """Tells it and ends this process, unless that is about to end by an error of its own. `print` has a lock others may hold."""
        if not self._cause_told.is_set():
            os.write(2, f"[rank {self._rank}] error: {text}{self._advice()}\n".encode())
            self._cause_told.set()
        if not self._failing:
            time.sleep(HEARING_SECONDS if self._rank == 0 else 0.0)
            os._exit(RUN_ERROR)

    def _quiet_text(self) -> str:
        now = time.monotonic()
        ranks = [f"{self._peers[rank]} for {now - since:.0f} s" for rank, since in sorted(self._quiet.items())]
        return f"no answer from {', '.join(ranks)}: stopped, or hanging"

    def _timeout_text(self) -> str:
        alive = "all ranks live, so one takes longer for its part or waits for another collective"
        late = self._quiet_text() if self._quiet else alive
        return (
            f"a collective timed out {self._where}, after {minutes_text(self._timeout)} (--distributed-timeout-minutes sets it); "
            f"{late}{self._advice()}"
        )

    def _advice(self) -> str:
        folder = self.checkpoint()
        return f"; --load {folder} goes on from the last checkpoint there" if folder else ""


def _say_no_more(connection: socket.socket) -> None:
    """The other side hears the end after what was said; a connection closed with words unheard might lose those under way."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _meet() -> tuple[list[Peer], dict[int, socket.socket]]:
    """All ranks by number, and connections by rank: rank 0's to all others, theirs to it. By the store that made the groups."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("peer_watch", dist.distributed_c10d._get_default_store())
    names, patience = [f"rank {number}" for number in range(ranks)], timedelta(seconds=CONNECT_SECONDS)
    try:
        store.set(names[rank], f"{socket.gethostname()} {os.getpid()}")
        if rank == 0:
            with _server() as server:
                token = secrets.token_hex()
                store.set(MEETING_POINT, f"{server.getsockname()[1]} {token}")
                connections = _accepted(server, ranks - 1, token)
            store.delete_key(MEETING_POINT)
        else:
            store.wait([MEETING_POINT], patience)
            port, token = store.get(MEETING_POINT).decode().split()
            connections = {0: _called(rank, int(port), token)}
        store.wait(names, patience)
        people = [store.get(name).decode().split() for name in names]
    except (OSError, dist.DistStoreError) as error:
        raise ConnectionError(
            f"rank {rank} did not meet the others, to watch whether they live: {error}; a MASTER_ADDR that all can reach works"
        ) from error
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in UNHEARD.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return [Peer(number, host, int(pid)) for number, (host, pid) in enumerate(people)], connections


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _accepted(server: socket.socket, count: int, token: str) -> dict[int, socket.socket]:
    """Connections by rank. One that does not begin with the token is a stranger's."""
    connections, deadline = {}, time.monotonic() + CONNECT_SECONDS
    while len(connections) < count:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        connection, _ = server.accept()
        connection.settimeout(INTRODUCTION_SECONDS)
        word, _, rank = _first_line(connection).partition(" ")
        if word == token:
            connections[int(rank)] = connection
        else:
            connection.close()
    return connections


def _first_line(connection: socket.socket) -> str:
    """And not a byte more: the next words are for the thread that listens."""
    line = b""
    with suppress(OSError):  # silent or gone: no introduction
        while not line.endswith(b"\n") and len(line) < 200 and (byte := connection.recv(1)):
            line += byte
    return line.decode(errors="replace")


def _called(rank: int, port: int, token: str) -> socket.socket:
    connection = socket.create_connection((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), timeout=CONNECT_SECONDS)
    connection.sendall(f"{token} {rank}\n".encode())
    return connection
