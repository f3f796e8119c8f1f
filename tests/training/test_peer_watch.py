"""Ranks that are killed, that fail and that end well: what the others say, and when they end. The ranks hang as in a collective."""

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacp.argument_checks import ArgumentError
from megacp.training import peer_watch
from megacp.training.errors import explain_errors
from megacp.training.initialize import _free_port
from megacp.training.peer_watch import PeerWatch
from tests.distributed import run_distributed, start_ranks
from tests.test_pretrain import MODEL, _main_with_own_group

ROOT = Path(__file__).parents[2]
SOON = 15.0  # seconds, on a busy machine


def said_in(folder, ranks):
    return [(folder / f"err{rank}").read_text() for rank in ranks]


def exit_codes(processes):
    """By rank, all ended soon, or None for one that hangs."""
    deadline = time.monotonic() + SOON
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _speaks_into(folder, rank):
    os.dup2(os.open(folder / f"err{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)


def hang(folder, rank, world_size):
    """In a step: all but the last rank wait for it in a collective."""
    (folder / f"in{rank}").touch()
    if rank == world_size - 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def killed(rank, world_size, folder):
    _speaks_into(folder, rank)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a wish to stop after the step
    with PeerWatch(checkpoint=lambda: "ckpt") as peers:
        peers.start_step(12, [])
        hang(folder, rank, world_size)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_the_others_which_end(victim, tmp_path):
    _, processes = start_ranks(killed, 3, tmp_path)
    while len(list(tmp_path.glob("in*"))) < 3:
        time.sleep(0.05)
    processes[victim].kill()
    others = [rank for rank in range(3) if rank != victim]
    processes[others[0]].terminate()  # as torchrun does
    codes = exit_codes(processes)
    assert codes.pop(victim) == -signal.SIGKILL and codes == [1, 1]
    pid, host = processes[victim].pid, re.escape(socket.gethostname())
    named = rf"rank {victim} \(host {host}, pid {pid}\) ended during step 12 without a word"
    for rank, text in zip(others, said_in(tmp_path, others)):
        assert re.fullmatch(rf"\[rank {rank}\] error: {named}.*; --load ckpt goes on from .*\n", text), text


def fails(rank, world_size, folder):
    _speaks_into(folder, rank)
    peer_watch.GRACE_SECONDS = 1.0
    with explain_errors(is_first_rank=rank == 0), PeerWatch() as peers:
        peers.start_step(3, [])
        if rank == 1:
            raise OSError(errno.ENOSPC, "no room", "part")
        time.sleep(60)


def test_a_rank_with_an_error_of_its_own_tells_it_and_the_others_end(tmp_path):
    _, processes = start_ranks(fails, 3, tmp_path)
    assert exit_codes(processes) == [1, 1, 1]
    first, failed, last = said_in(tmp_path, range(3))
    assert failed == "[rank 1] error: OSError: [Errno 28] no room: 'part'\n"
    for text in (first, last):
        assert "rank 1 (host" in text and "ended during step 3 with an error of its own" in text


def all_fail(rank, world_size, folder):
    _speaks_into(folder, rank)
    with explain_errors(is_first_rank=rank == 0), PeerWatch():
        time.sleep(0.3 * rank)
        raise ArgumentError(f"what rank {rank} found")


def test_an_error_that_all_ranks_find_is_told_by_each(tmp_path):
    _, processes = start_ranks(all_fail, 3, tmp_path)
    assert exit_codes(processes) == [2, 2, 2]
    assert said_in(tmp_path, range(3)) == [f"[rank {rank}] error: what rank {rank} found\n" for rank in range(3)]


def collective_fails(rank, world_size, folder):
    _speaks_into(folder, rank)
    with PeerWatch() as peers:
        peers.start_step(1, [])
        (folder / f"in{rank}").touch()
        time.sleep(0.5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")  # before its end is heard of: rank 1 kills itself at the same time


def test_a_collective_that_failed_for_want_of_a_peer_leaves_the_word_to_its_end(tmp_path):
    _, processes = start_ranks(collective_fails, 3, tmp_path)
    assert exit_codes(processes) == [1, -signal.SIGKILL, 1]
    for text in said_in(tmp_path, (0, 2)):
        assert text.count("\n") == 1 and "rank 1 (host" in text and "ended during step 1 without" in text


def what_could_be_loaded(rank, world_size, flags):
    """At the beginning of each step of a run of the entry point."""
    import pretrain_llama

    heard = []

    class Listening(PeerWatch):
        def start_step(self, step, batches):
            super().start_step(step, batches)
            heard.append(self.checkpoint())

    pretrain_llama.PeerWatch = Listening
    _main_with_own_group(rank, world_size, flags)
    return heard


def test_a_checkpoint_to_go_on_from_is_named_once_there_is_one(tmp_path):
    folder = str(tmp_path / "ckpt")
    flags = [*MODEL, "--mock-data", "--save", folder, "--load", folder, "--save-interval", "2", "--lr-decay-iters", "6"]
    assert run_distributed(what_could_be_loaded, 1, [*flags, "--train-iters", "4"]) == [[None, None, folder, folder]]
    assert run_distributed(what_could_be_loaded, 1, [*flags, "--train-iters", "5"]) == [[folder]]


def many_rounds(rank, world_size):
    for round_ in range(20):
        with PeerWatch() as peers:
            peers.start_step(round_, [])
            time.sleep(0.01 * ((round_ + rank) % 3))
            peers.finish_step()
        dist.barrier()  # the next ones meet in the same place
    return True


def test_ranks_that_end_well_are_not_missed_in_whatever_order_they_leave():
    assert run_distributed(many_rounds, 3) == [True] * 3


def busy(rank, world_size):
    with PeerWatch():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        deadline = time.monotonic() + 1.5
        while rank == 0 and time.monotonic() < deadline:
            pass
    return True


def test_a_rank_that_is_stopped_or_busy_is_not_gone():
    ranks, processes = start_ranks(busy, 2)
    time.sleep(2.5)
    assert processes[1].is_alive()
    os.kill(processes[1].pid, signal.SIGCONT)
    assert exit_codes(processes) == [0, 0]


def with_a_stranger(rank, world_size):
    original = peer_watch._server

    def server():
        made = original()
        with suppress(OSError), socket.create_connection(("127.0.0.1", made.getsockname()[1])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return made

    peer_watch._server = server
    with PeerWatch():
        return True


def test_a_stranger_on_the_port_is_turned_away():
    assert run_distributed(with_a_stranger, 2) == [True, True]


def unreachable(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1" if rank == 0 else "192.0.2.1.invalid"
    peer_watch.CONNECT_SECONDS = 0.5
    with pytest.raises(ConnectionError, match=f"rank {rank} did not meet the others.*; a MASTER_ADDR that all can reach"):
        PeerWatch().__enter__()
    return True


def test_ranks_that_cannot_reach_each_other_say_so():
    assert run_distributed(unreachable, 2) == [True, True]


LIMIT = timedelta(seconds=3)  # of a collective


def stopped(rank, world_size, folder, victim, how):
    _speaks_into(folder, rank)
    group = dist.new_group(timeout=LIMIT)
    with explain_errors(is_first_rank=rank == 0), PeerWatch(timeout=LIMIT, checkpoint=lambda: "ckpt") as peers:
        peers.start_step(12, [])
        (folder / f"in{rank}").touch()
        if rank == victim and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == victim:
            time.sleep(60)
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize("victim, how", [(2, "stopped"), (0, "stopped"), (1, "asleep")])
def test_a_collective_that_times_out_names_the_rank_that_does_not_answer(victim, how, tmp_path):
    _, processes = start_ranks(stopped, 3, tmp_path, victim, how)
    others = [rank for rank in range(3) if rank != victim]
    for rank in others:
        processes[rank].join(SOON)
    assert [processes[rank].exitcode for rank in others] == [1, 1]
    processes[victim].kill()
    texts = said_in(tmp_path, others)
    named = rf"rank {victim} \(host \S+, pid {processes[victim].pid}\)"
    warned = re.compile(rf"\[rank \d\] warning: during step 12: {named} has not answered for 1 s")
    assert [len(warned.findall(text)) for text in texts] == [int(how == "stopped"), 0], texts
    errors = [line for text in texts for line in text.splitlines() if "error" in line]
    assert len(errors) == 2 and not any("Traceback" in text for text in texts), texts
    late = rf"no answer from {named} for \d s" if how == "stopped" else "all ranks live"
    timed_out = rf"a collective timed out during step 12, after 0\.05 min \(--distributed-timeout-minutes sets it\); {late}.*ckpt"
    assert any(re.search(timed_out, line) for line in errors), errors
    assert all(re.search(timed_out, line) or "with an error of its own" in line for line in errors), errors


def stopped_for_a_while(rank, world_size, folder):
    _speaks_into(folder, rank)
    with PeerWatch(timeout=LIMIT) as peers:
        peers.start_step(1, [])
        (folder / f"in{rank}").touch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_goes_on_is_told_too(tmp_path):
    _, processes = start_ranks(stopped_for_a_while, 2, tmp_path)
    deadline = time.monotonic() + SOON
    while not (tmp_path / "in0").exists() or "has not answered" not in (tmp_path / "err0").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGCONT)
    assert exit_codes(processes) == [0, 0]
    first, other = said_in(tmp_path, range(2))
    assert first.count("\n") == 2 and f"pid {processes[1].pid}) answers again, after " in first and other == ""


def fails_in_a_collective_of_others(rank, world_size, folder):
    _speaks_into(folder, rank)
    with explain_errors(is_first_rank=rank == 0), PeerWatch() as peers:
        peers.start_step(3, [])
        dist.barrier()
        if rank == 1:
            raise OSError(errno.ENOSPC, "no room", "part")
        dist.all_reduce(torch.ones(1))


def test_a_collective_that_failed_for_a_peers_error_has_no_traceback(tmp_path):
    _, processes = start_ranks(fails_in_a_collective_of_others, 2, tmp_path)
    assert exit_codes(processes) == [1, 1]
    waited, failed = said_in(tmp_path, range(2))
    assert failed == "[rank 1] error: OSError: [Errno 28] no room: 'part'\n"
    assert waited.count("\n") == 1 and "ended during step 3 with an error of its own, which it printed (here: " in waited


def options_of_connections(rank, world_size):
    with PeerWatch() as peers:
        return [
            [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in peer_watch.UNHEARD]
            for connection in peers._connections.values()
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not have all of the options")
def test_both_ends_of_a_connection_give_up_a_host_that_acknowledges_nothing():
    given_up = [10, 5, 4, 30_000]
    assert run_distributed(options_of_connections, 3) == [[given_up, given_up], [given_up], [given_up]]


def loses_its_network(rank, world_size, folder):
    _speaks_into(folder, rank)
    # Rank 0 has a ping under way, the other only what the system sends by itself.
    peer_watch.UNHEARD = {"TCP_USER_TIMEOUT": 1500} | ({"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1} if rank else {})
    peer_watch.QUIET_SECONDS = 2.0
    with PeerWatch() as peers:
        peers.start_step(5, [])
        (folder / f"in{rank}").touch()
        time.sleep(60)


def cut_network_off(folder):
    """In a network namespace of its own, whose only link goes down while the ranks hang."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _, processes = start_ranks(loses_its_network, 2, folder)
    while len(list(folder.glob("in*"))) < 2:
        time.sleep(0.05)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    print(exit_codes(processes))


def test_a_host_that_is_cut_off_is_noticed_though_pings_to_it_are_under_way(tmp_path):
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("ip") or not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    code = f"import pathlib; from {__name__} import cut_network_off; cut_network_off(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([*alone, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[1, 1]\n", done.stderr
    for rank, text in enumerate(said_in(tmp_path, range(2))):
        gone = rf"rank {1 - rank} \(host \S+, pid \d+\) ended during step 5 or its host is gone: no answer for half a minute; .*"
        assert re.search(rf"^\[rank {rank}\] error: {gone}$", text, re.MULTILINE), text


ORPHANS = """
import sys, time
import torch.distributed as dist
from megacp.training.peer_watch import PeerWatch
dist.init_process_group("gloo")
with PeerWatch(checkpoint=lambda: "ckpt") as peers:
    peers.start_step(7, [])
    open(f"{sys.argv[1]}/in{dist.get_rank()}", "w").close()
    time.sleep(60)
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_without_their_launcher_end_and_say_so(ranks, tmp_path):
    ports = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(ranks), TORCHELASTIC_RUN_ID="none")
    start = " ".join(f'RANK={rank} "$PYTHON" -c "$ORPHANS" "$FOLDER" 2> "$FOLDER/err{rank}" &' for rank in range(ranks))
    settings = dict(PYTHON=sys.executable, ORPHANS=ORPHANS, FOLDER=str(tmp_path), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    launcher = subprocess.Popen(["bash", "-c", f"{start} echo $(jobs -p); wait"], stdout=subprocess.PIPE, text=True,
                                env=os.environ | ports | settings)  # fmt: skip
    pids = launcher.stdout.readline().split()
    while len(list(tmp_path.glob("in*"))) < ranks:
        assert launcher.poll() is None, said_in(tmp_path, range(ranks))
        time.sleep(0.05)
    launcher.kill()
    deadline = time.monotonic() + SOON
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for rank, text in enumerate(said_in(tmp_path, range(ranks))):
        gone = rf"the launcher \(torchrun, pid {launcher.pid}\) is gone, during step 7: .*; this rank ends; --load ckpt goes on .*"
        assert re.fullmatch(rf"\[rank {rank}\] error: {gone}\n", text), text
