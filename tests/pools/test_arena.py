from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ClosedError, ConfigError, PoolFullError, SlotError
from tiercache.pools import HostArena, MemoryReadings, arena, plan_auto_size, read_memory

GIB, MIB = 1 << 30, 1 << 20


def test_blocks_are_disjoint_writable_and_zero() -> None:
    with_blocks = HostArena(10 * 8192 + 4096, 8192)
    assert (with_blocks.blocks, with_blocks.nbytes, with_blocks.available) == (10, 81920, 10)
    blocks = with_blocks.alloc(4)
    assert with_blocks.available == 6
    for block in blocks.tolist():
        view = with_blocks.view(block)
        assert (len(view), view.readonly, view.contiguous) == (8192, False, True)
        assert not any(view)
        view[:] = bytes([block]) * 8192
    whole = bytes(with_blocks.hold())
    assert all(whole[block * 8192 : (block + 1) * 8192] == bytes([block]) * 8192 for block in blocks.tolist())
    with_blocks.check_integrity()
    with pytest.raises(PoolFullError):
        with_blocks.alloc(7)
    with pytest.raises(SlotError, match="arena block 10 is out of range"):
        with_blocks.view(10)
    with pytest.raises(SlotError):
        with_blocks.view(-1)
    with_blocks.free(blocks)
    with pytest.raises(SlotError):
        with_blocks.free(blocks)
    with_blocks.close()


def test_the_address_and_the_fd_are_the_same_bytes() -> None:
    one = HostArena(8 * 4096, 4096)
    one.view(2)[:5] = b"tiers"
    other = mmap.mmap(one.fd, 8 * 4096)
    assert other[8192:8197] == b"tiers"
    assert ctypes.string_at(one.address + 8192, 5) == b"tiers"
    other.close()
    one.close()


def test_it_is_sealed_against_resizing() -> None:
    one = HostArena(4096, 4096)
    assert fcntl.fcntl(one.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for nbytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(one.fd, nbytes)
    one.close()


def test_closing_twice_with_a_view_out() -> None:
    one = HostArena(3 * 4096, 4096)
    view, array = one.view(1), np.frombuffer(one.hold(), np.uint8)
    fd = one.fd
    one.close()
    one.close()
    view[:3] = b"yes"  # still mapped
    assert array[4096:4099].tobytes() == b"yes"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    for use in (lambda: one.view(0), one.hold, lambda: one.alloc(1)):
        with pytest.raises(ClosedError):
            use()


def test_a_lost_arena_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        HostArena(4096, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_every_page_is_faulted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostArena(200 * MIB, MIB, threads=2)
    assert "MADV_POPULATE_WRITE" in one.report
    assert "with 2 threads" in one.report
    assert os.fstat(one.fd).st_blocks * 512 == one.nbytes
    one.close()
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 12345)  # an older kernel: EINVAL
    one = HostArena(80 * MIB + 4096, 4096)
    assert "touched page by page" in one.report
    assert os.fstat(one.fd).st_blocks * 512 == one.nbytes
    one.close()


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(arena._libc, "madvise", lambda *_: -1)
    monkeypatch.setattr(arena.ctypes, "get_errno", lambda: errno.ENOMEM)
    with pytest.raises(ConfigError, match="could not be faulted in"):
        HostArena(4096, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_huge_pages_fall_back_and_say_so() -> None:
    promised = MemoryReadings(available=GIB, huge_free=GIB)  # promised by the reading only, on most machines
    one = HostArena(2 * MIB, 4096, readings=promised)
    assert "huge" in one.report
    assert one.nbytes == 2 * MIB
    one.close()
    one = HostArena(4096, 4096, huge_pages=False)
    assert "huge pages off" in one.report
    one.close()


@pytest.mark.parametrize("block_bytes", [0, -4096, 100, 4097])
def test_blocks_that_are_not_possible(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        HostArena(1 << 20, block_bytes)


def test_sizes_that_are_not_possible() -> None:
    tight = MemoryReadings(available=10 * GIB, limit=4 * GIB, usage=GIB)
    with pytest.raises(ConfigError, match=rf"5.0 GiB \({5 * GIB} bytes\) is wanted and only 3.0 GiB \({3 * GIB} bytes\) is available"):
        HostArena(5 * GIB, 4096, readings=tight)
    with pytest.raises(ConfigError, match="does not hold one block"):
        HostArena(4096, 8192)
    with pytest.raises(ConfigError, match=r"only 3\.0 GiB"):  # huge pages would have room, but are switched off
        HostArena(5 * GIB, 4096, readings=MemoryReadings(3 * GIB, huge_free=8 * GIB), huge_pages=False)


def test_auto_takes_a_fraction() -> None:
    one = HostArena("auto", 4096, readings=MemoryReadings(available=20 * MIB), fraction=0.5, reserve=MIB)
    assert one.nbytes == 10 * MIB
    assert "auto: 50% of 20.0 MiB usable (MemAvailable 20.0 MiB, no cgroup limit)" in one.report
    one.close()


@given(
    available=st.none() | st.integers(0, 1 << 42),
    limit=st.none() | st.integers(0, 1 << 42),
    usage=st.integers(0, 1 << 42),
    fraction=st.floats(0.05, 1.0),
    reserve=st.integers(0, 1 << 36),
)
def test_auto_never_exceeds_what_there_is(available: int | None, limit: int | None, usage: int, fraction: float, reserve: int) -> None:
    readings = MemoryReadings(available, limit, usage)
    if readings.usable is None or min(int(readings.usable * fraction), readings.usable - reserve) <= 0:
        with pytest.raises(ConfigError):
            plan_auto_size(readings, fraction=fraction, reserve=reserve)
        return
    plan = plan_auto_size(readings, fraction=fraction, reserve=reserve)
    assert 0 < plan.nbytes <= readings.usable * fraction
    assert plan.nbytes + reserve <= readings.usable
    assert plan.reason.startswith("auto: ")


def test_auto_is_not_rounded_to_a_power_of_two() -> None:
    plan = plan_auto_size(MemoryReadings(100 * GIB), fraction=0.7)
    assert plan.nbytes == int(100 * GIB * 0.7)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 99 kB\nMemAvailable:   1000 kB\nHugePages_Free:  5\nHugePages_Rsvd: 1\nHugepagesize: 2048 kB\n"


def test_reading_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/server\n",
            "sys/fs/cgroup/pod/server/memory.max": "max\n",
            "sys/fs/cgroup/pod/server/memory.current": "300000\n",
            "sys/fs/cgroup/pod/memory.max": "800000\n",
            "sys/fs/cgroup/pod/memory.current": "500000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/fs/cgroup/memory.max": "900000\n",
            "sys/fs/cgroup/memory.current": "500000\n",
        },
    )
    readings = read_memory(root)
    assert readings == MemoryReadings(available=1024000, limit=800000, usage=400000, huge_free=8 * MIB)
    assert readings.usable == 400000


def test_reading_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "700000",  # a container sees its own group as the root
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "50000",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\n",
    }
    assert read_memory(_write(tmp_path, files)).usable == 700000 - 30000
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712"
    assert read_memory(_write(tmp_path, files)).limit is None


def test_reading_where_nothing_can_be_read(tmp_path: Path) -> None:
    readings = read_memory(tmp_path)
    assert readings.usable is None
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_auto_size(readings)
    HostArena(4096, 4096, readings=readings).close()
