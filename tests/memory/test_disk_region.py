"""The disk tier alone: what is read is what was written last, whatever the order and speed; what goes wrong is said, and nothing stays."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from megacp.memory import disk_region
from megacp.memory.copies import Copies
from megacp.memory.disk_file import PAGE, DiskError
from megacp.memory.disk_region import DiskPool

CPU = torch.device("cpu")
COPIES = Copies(CPU)
CHUNK = 2 * PAGE
MiB = 2**20


def make_pool(directory, slots=3, bytes_=4 * MiB, chunk=CHUNK):
    return DiskPool(str(directory), bytes_, torch.empty((slots + 1) * chunk, dtype=torch.uint8), chunk, CPU)


def slow(function, seconds):
    """The function, and before it a random one of `seconds`."""

    def call(*args):
        time.sleep(random.choice(seconds))
        return function(*args)

    return call


def file_of(pool):
    """A descriptor of the pool's file, whose name is gone."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and os.readlink(path) == f"{pool.file.path} (deleted)":
            return os.open(path, os.O_RDWR)
    raise AssertionError(f"nothing holds {pool.file.path}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 6])
def test_reads_give_what_was_written_last_in_any_order(tmp_path, monkeypatch, seed, slots):
    """Blocks of less than a chunk and of several, on page borders and off them, rewritten and read while transfers are under way."""
    random.seed(seed)
    monkeypatch.setattr(os, "pwrite", slow(os.pwrite, (0, 0, 0.001, 0.004)))
    monkeypatch.setattr(os, "preadv", slow(os.preadv, (0, 0, 0.001, 0.004)))
    monkeypatch.setattr(disk_region, "_copy", slow(disk_region._copy, (0, 0, 0.001)))
    pool = make_pool(tmp_path, slots)
    sizes = [1, 1000, PAGE, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 77]
    regions = [pool.take(sum(sizes)) for _ in range(2)]
    blocks = [(region, number, sum(sizes[:number]), size) for region in regions for number, size in enumerate(sizes)]
    generator = torch.Generator().manual_seed(seed)
    written, under_way = {}, []
    for _ in range(120):
        region, number, offset, size = random.choice(blocks)
        if (region, number) in written and random.random() < 0.5:
            destination = torch.zeros(size, dtype=torch.uint8)
            under_way.append((region.read(number, offset, destination, COPIES), written[region, number]))
        else:
            source = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            written[region, number] = source.clone()
            region.write(number, offset, source, COPIES).wait()
            source.zero_()  # as its owner may from here on
        while under_way and random.random() < 0.6:
            pending, expected = under_way.pop(random.randrange(len(under_way)))
            assert torch.equal(pending.wait(), expected)
    for pending, expected in under_way:
        assert torch.equal(pending.wait(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_block_keeps_its_dtype_and_shape_and_leaves_no_trace_in_autograd(tmp_path, dtype):
    region = make_pool(tmp_path).take(MiB)
    source = torch.randn(3, 5, 7).to(dtype).requires_grad_()
    region.write("x", 0, source, COPIES).wait()
    out = region.read("x", 0, torch.empty(3, 5, 7, dtype=dtype), COPIES).wait()
    assert torch.equal(out, source) and not out.requires_grad


def test_nobody_waits_for_the_disk_before_he_must_and_staged_memory_is_free(tmp_path, monkeypatch):
    """While the disk does not answer at all, transfers start, and a write's source is its owner's again."""
    pool, answers, write = make_pool(tmp_path), threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: answers.wait(30) and write(*args))
    region = pool.take(MiB)
    array = np.full(CHUNK, 7, dtype=np.uint8)
    alive, source = weakref.ref(array), torch.from_numpy(array)
    pending = region.write("x", 0, source, COPIES)
    arriving = region.read("x", 0, torch.empty(CHUNK, dtype=torch.uint8), COPIES)
    pending.wait()
    del array, source, pending
    assert alive() is None, "a thread keeps the memory of a tensor that it has copied"
    assert not answers.is_set()
    answers.set()
    assert (arriving.wait() == 7).all()


def test_whole_pages_pass_by_the_page_cache_where_the_file_system_can(tmp_path, monkeypatch):
    """Everything else, the rest of a short transfer too, goes through it: direct I/O would refuse it."""
    pool = make_pool(tmp_path)
    if not pool.file.bypasses_page_cache:
        pytest.skip("no direct I/O on this file system")
    direct = []

    def spy(fd, data, position):
        flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        direct.append(bool(flags & os.O_DIRECT))
        return min(len(data), 2 * PAGE)

    monkeypatch.setattr(os, "pwrite", spy)
    for position, length in ((PAGE, 2 * PAGE), (PAGE, 100), (100, PAGE), (PAGE, 4 * PAGE)):
        pool.file.write(position, memoryview(bytearray(length)))
    assert direct == [True, False, False, True, False]


def test_a_file_system_without_direct_io_serves_too(tmp_path, monkeypatch):
    real = os.open

    def refuses(path, flags, *mode, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    pool = make_pool(tmp_path)
    assert not pool.file.bypasses_page_cache
    source = torch.arange(CHUNK, dtype=torch.int32)
    region = pool.take(MiB)
    region.write("x", 0, source, COPIES).wait()
    assert torch.equal(region.read("x", 0, torch.empty_like(source), COPIES).wait(), source)


# ---------------------------------------------------------------------------------------------------------------- faults


def fails(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


def written_region(pool):
    region = pool.take(MiB)
    region.write("x", 0, torch.arange(CHUNK, dtype=torch.int32), COPIES).wait()
    return region


def read_back(region):
    return region.read("x", 0, torch.empty(CHUNK, dtype=torch.int32), COPIES).wait()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_raised_by_whatever_comes_next(tmp_path, monkeypatch, number):
    pool = make_pool(tmp_path)
    region = pool.take(MiB)
    monkeypatch.setattr(os, "pwrite", fails(number))
    source = torch.arange(CHUNK, dtype=torch.int32)
    earlier = region.write("earlier", 4 * CHUNK, source, COPIES)
    deadline = time.monotonic() + 5
    with pytest.raises(
        DiskError, match=rf"^--disk-offload-dir {tmp_path}: writing bytes [\d,]+ to [\d,]+ of .*: .*{os.strerror(number)}"
    ):
        while time.monotonic() < deadline:
            region.write("x", 0, source, COPIES).wait()
    with pytest.raises(DiskError, match="writing"):
        read_back(region)
    with pytest.raises(DiskError, match="writing"):
        earlier.wait()
    with pytest.raises(DiskError, match="writing"):  # in any region of the pool
        pool.take(8).write("y", 0, torch.zeros(8), COPIES)


def test_a_failed_read_is_raised_where_it_is_waited_for(tmp_path, monkeypatch):
    region = written_region(make_pool(tmp_path))
    monkeypatch.setattr(os, "preadv", fails(errno.EIO))
    with pytest.raises(DiskError, match="--disk-offload-dir .* reading bytes .*Input/output error"):
        read_back(region)


def test_a_write_past_a_limit_of_the_system_is_an_error_too(tmp_path):
    """The kernel's own refusal, here of a file size, in the middle of a chunk: part of it is written, the rest cannot be."""
    code = (
        "import resource, tests.memory.test_disk_region as t\n"
        f"region = t.make_pool({str(tmp_path)!r}).take(t.MiB)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (t.PAGE, t.PAGE))\n"
        "region.write('x', 0, t.torch.arange(t.CHUNK, dtype=t.torch.int32), t.COPIES).wait()\n"
        "t.read_back(region)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "DiskError: --disk-offload-dir" in done.stderr and "File too large" in done.stderr


def test_short_transfers_are_continued(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: -(-len(data) // 2)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][: -(-len(parts[0]) // 3)]], at))
    region = written_region(make_pool(tmp_path))
    assert torch.equal(read_back(region), torch.arange(CHUNK, dtype=torch.int32))


@pytest.mark.parametrize("call, doing", [("pwrite", "writing"), ("preadv", "reading")])
def test_a_transfer_that_goes_no_further_is_an_error(tmp_path, monkeypatch, call, doing):
    region = written_region(make_pool(tmp_path))
    read_back(region)  # the write is through
    monkeypatch.setattr(os, call, lambda *_: 0)
    with pytest.raises(DiskError, match=f"{doing} .* the file ends after 0 of them"):
        region.write("x", 0, torch.zeros(CHUNK, dtype=torch.int32), COPIES).wait()
        read_back(region)


def test_a_truncated_file_is_an_error(tmp_path):
    pool = make_pool(tmp_path)
    region = written_region(pool)
    read_back(region)
    os.truncate(fd := file_of(pool), PAGE)
    os.close(fd)
    with pytest.raises(DiskError, match="reading .* the file ends after"):
        read_back(region)


@pytest.mark.parametrize("position", [0, CHUNK + 5, 4 * CHUNK - 1])
def test_one_changed_bit_in_the_file_is_found(tmp_path, position):
    pool = make_pool(tmp_path)
    region = written_region(pool)
    assert torch.equal(read_back(region), torch.arange(CHUNK, dtype=torch.int32))
    fd = file_of(pool)
    (byte,) = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte ^ 4]), position)
    os.close(fd)
    first = position // CHUNK * CHUNK
    with pytest.raises(DiskError, match=f"--disk-offload-dir {tmp_path}: reading back bytes {first:,} to .* CRC-32"):
        read_back(region)


def test_a_disk_without_room_is_refused_at_the_start_with_both_sizes():
    status = os.statvfs("/dev/shm")
    needed = 2 * status.f_blocks * status.f_frsize
    with pytest.raises(
        ValueError, match=f"--disk-offload-dir /dev/shm cannot hold .* {needed:,} bytes .* needed, [0-9,]+ free"
    ) as error:
        make_pool("/dev/shm", bytes_=needed)
    assert os.strerror(errno.ENOSPC) in str(error.value)
    after = os.statvfs("/dev/shm")
    assert after.f_bfree >= status.f_bfree - 2**28 // status.f_frsize, "the refused room is still taken"


def test_room_taken_before_the_disk_was_full_is_given_back_and_counted_as_free(tmp_path, monkeypatch):
    allocate, free = os.posix_fallocate, os.statvfs
    fds = []

    def half(fd, first, length):
        fds.append(fd)
        allocate(fd, first, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def count(directory):
        assert os.fstat(fds[0]).st_blocks == 0
        return free(directory)

    monkeypatch.setattr(os, "posix_fallocate", half)
    monkeypatch.setattr(os, "statvfs", count)
    with pytest.raises(ValueError, match="cannot hold"):
        make_pool(tmp_path)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"--disk-offload-dir {tmp_path}/none: .*No such file or directory"):
        make_pool(tmp_path / "none")


def test_a_disk_that_fails_at_once_is_named(tmp_path, monkeypatch):
    if not make_pool(tmp_path).file.bypasses_page_cache:
        pytest.skip("no direct I/O on this file system")
    monkeypatch.setattr(os, "pwrite", fails(errno.EIO))
    with pytest.raises(ValueError, match=f"--disk-offload-dir {tmp_path}: .*Input/output error"):
        make_pool(tmp_path)
    assert os.listdir(tmp_path) == []


def test_staging_memory_too_small_for_a_chunk_is_refused(tmp_path):
    with pytest.raises(ValueError, match="staging memory"):
        DiskPool(str(tmp_path), MiB, torch.empty(CHUNK - 1, dtype=torch.uint8), CHUNK, CPU)


# --------------------------------------------------------------------------------------------------------- nothing stays


def test_kill_9_leaves_neither_a_file_nor_its_room(tmp_path):
    code = (
        "import time, tests.memory.test_disk_region as t\n"
        f"pool = t.make_pool({str(tmp_path)!r}, bytes_=64 * t.MiB)\n"
        "t.read_back(t.written_region(pool))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    assert os.listdir(tmp_path) == []
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL
    process.stdout.close()
    assert os.listdir(tmp_path) == []


def test_a_pool_no_longer_used_gives_its_descriptors_back(tmp_path):
    written_region(make_pool(tmp_path))
    deadline = time.monotonic() + 5
    while held := [link for link in _links() if str(tmp_path) in link]:
        assert time.monotonic() < deadline, held
        time.sleep(0.01)


def _links():
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            pass
