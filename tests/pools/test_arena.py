from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import example_count
from tests.pools.integrity import check_arena
from tiercache import memory
from tiercache.errors import ClosedError, ConfigError, PoolFullError, SlotError
from tiercache.pools import HostArena, MemoryReadings, arena, plan_size, read_memory

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
    check_arena(with_blocks)
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
    assert fcntl.fcntl(one.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for nbytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(one.fd, nbytes)
    one.close()


def test_who_maps_it_may_seal_it_further() -> None:
    one = HostArena(2 * 4096, 4096, huge_pages=False)
    other = mmap.mmap(one.fd, 2 * 4096)
    # F_SEAL_FUTURE_WRITE, which the module does not name
    fcntl.fcntl(one.fd, fcntl.F_ADD_SEALS, 0x10 | fcntl.F_SEAL_SEAL)
    one.view(1)[:4] = b"ours"
    other[:6] = b"theirs"
    assert (bytes(one.view(0)[:6]), other[4096:4100]) == (b"theirs", b"ours")
    with pytest.raises(PermissionError):
        mmap.mmap(one.fd, 2 * 4096)
    other.close()
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
    one = HostArena(200 * MIB, MIB)
    assert "MADV_POPULATE_WRITE" in one.report
    assert os.fstat(one.fd).st_blocks * 512 == one.nbytes
    one.close()
    # private: the kernel answers a number that it does not know as an older one would, with EINVAL
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 12345)
    one = HostArena(80 * MIB + 4096, 4096)
    assert "touched page by page" in one.report
    assert os.fstat(one.fd).st_blocks * 512 == one.nbytes
    one.close()


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse(address: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(arena, "populate", refuse)
    with pytest.raises(ConfigError, match="could not be faulted in"):
        HostArena(4096, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_report_says_which_pages_it_has() -> None:
    for huge_pages, said in (
        (True, "huge pages asked for|ordinary pages \\(shmem_enabled="),
        (False, "pages off"),
    ):
        one = HostArena(2 * MIB, 4096, huge_pages=huge_pages)
        assert re.search(said, one.report)
        one.close()


@pytest.mark.parametrize("block_bytes", [0, -4096, 100, 4097])
def test_blocks_that_are_not_possible(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        HostArena(1 << 20, block_bytes)


def test_sizes_that_are_not_possible() -> None:
    tight = MemoryReadings(available=10 * GIB, limit=4 * GIB, usage=GIB)
    with pytest.raises(
        ConfigError,
        match=rf"5.0 GiB \({5 * GIB} bytes\) is wanted and only 3.0 GiB \({3 * GIB} bytes\) is available",
    ):
        HostArena(5 * GIB, 4096, readings=tight)
    with pytest.raises(ConfigError, match="does not hold one block"):
        HostArena(4096, 8192)


@given(available=st.none() | st.integers(0, 1 << 42), limit=st.none() | st.integers(0, 1 << 42))
def test_auto_never_exceeds_what_there_is(available: int | None, limit: int | None) -> None:
    readings = MemoryReadings(available, limit, 5 * GIB)
    usable = readings.usable
    if usable is None or usable <= 2 * GIB:
        with pytest.raises(ConfigError):
            plan_size("auto", readings)
        return
    plan = plan_size("auto", readings)
    assert plan.nbytes == min(usable // 2, usable - 2 * GIB)
    assert plan.reason.startswith("auto: ")


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 99 kB\nMemAvailable:   1000 kB\n"


def test_reading_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pod/server\n",
            "sys/fs/cgroup/pod/server/memory.max": "max\n",
            "sys/fs/cgroup/pod/server/memory.current": "300000\n",
            "sys/fs/cgroup/pod/memory.max": "800000\n", "sys/fs/cgroup/pod/memory.current": "500000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/fs/cgroup/memory.max": "900000\n", "sys/fs/cgroup/memory.current": "500000\n",
        },
    )  # fmt: skip
    readings = read_memory(root)
    assert readings == MemoryReadings(
        available=1024000, limit=800000, usage=400000,
        total=99 * 1024, tightest=800000, tightest_group=str(root / "sys/fs/cgroup/pod"),
    )  # fmt: skip
    assert readings.usable == 400000
    assert readings.ceiling == 99 * 1024


def test_the_group_with_the_least_room_need_not_be_the_one_with_the_lowest_limit(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000 kB\n", "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": "800000\n", "sys/fs/cgroup/pod/memory.current": "100000\n",
            "sys/fs/cgroup/memory.max": "900000\n", "sys/fs/cgroup/memory.current": "850000\n",
        },
    )  # fmt: skip
    readings = read_memory(root)
    assert (readings.usable, readings.ceiling) == (50000, 800000)


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
        plan_size("auto", readings)
    HostArena(4096, 4096, readings=readings).close()


# -- quarantine

BLOCK = 4096
BLOCKS = 12


@pytest.mark.parametrize(
    "bad", [(-1, 5), (0, -1), (BLOCKS * BLOCK, 1), (5, BLOCKS * BLOCK), (1 << 62, 1 << 62)]
)
def test_quarantine_outside_the_arena_is_refused(bad: tuple[int, int]) -> None:
    one = HostArena(BLOCKS * BLOCK, BLOCK)
    with pytest.raises(SlotError, match="not inside"):
        one.quarantine([(0, BLOCK), bad])
    assert one.available == BLOCKS
    one.close()


def test_quarantine_may_outlive_the_arena() -> None:
    one = HostArena(BLOCKS * BLOCK, BLOCK)
    blocks = one.alloc(2)
    lift = one.quarantine([(0, BLOCKS * BLOCK)])
    one.close()
    lift()
    one.quarantine([(0, 1)])()
    one.free(blocks)
    check_arena(one)


def test_quarantines_come_and_go_on_other_threads() -> None:
    one = HostArena(64 * BLOCK, BLOCK)

    def watch(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(200):
            lifts = [one.quarantine([(int(random.integers(64)) * BLOCK, 1)]) for _ in range(3)]
            for lift in lifts:
                lift()

    with ThreadPoolExecutor(3) as pool:
        watchers = [pool.submit(watch, seed) for seed in range(3)]
        held: set[int] = set()
        while not all(watcher.done() for watcher in watchers):
            taken = one.alloc(min(7, one.available) // 2).tolist()
            assert not held & set(taken)
            held |= set(taken)
            if len(held) > 20:
                one.free(sorted(held)[::2])
                held -= set(sorted(held)[::2])
        for watcher in watchers:
            watcher.result()
    one.free(sorted(held))
    assert (one.available, one.withheld) == (64, 0)
    check_arena(one)
    one.close()


class QuarantineMachine(RuleBasedStateMachine):
    """Machine of {alloc, free, quarantine, lift} against plain sets of block numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena(BLOCKS * BLOCK, BLOCK, huge_pages=False)
        self.held: set[int] = set()
        self.isolated: list[tuple[set[int], Callable[[], None]]] = []
        self.lifted: list[Callable[[], None]] = []

    @property
    def free_blocks(self) -> set[int]:
        return set(range(BLOCKS)) - self.held - self.under

    @property
    def under(self) -> set[int]:
        return set().union(*(blocks for blocks, _ in self.isolated))

    @rule(n=st.integers(0, BLOCKS))
    def alloc(self, n: int) -> None:
        free = self.free_blocks
        if n > len(free):
            with pytest.raises(PoolFullError):
                self.arena.alloc(n)
            return
        taken = self.arena.alloc(n).tolist()
        assert len(set(taken)) == n
        assert set(taken) <= free
        self.held |= set(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.arena.free(blocks)
        self.held -= set(blocks)

    @rule(
        blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True),
        again=st.booleans(),
        data=st.data(),
    )
    def free_wrongly(self, blocks: list[int], again: bool, data: st.DataObject) -> None:
        if again:
            blocks = [*blocks, data.draw(st.sampled_from(blocks))]
        if again or not set(blocks) <= self.held:
            with pytest.raises(SlotError):
                self.arena.free(blocks)

    @rule(ranges=st.lists(st.tuples(st.integers(0, BLOCKS * BLOCK), st.integers(0, 3 * BLOCK)), max_size=3))
    def quarantine(self, ranges: list[tuple[int, int]]) -> None:
        ranges = [(at, min(length, BLOCKS * BLOCK - at)) for at, length in ranges]
        touched = {
            byte // BLOCK
            for at, length in ranges
            for byte in (*range(at, at + length, BLOCK), at + length - 1)
            if length
        }
        self.isolated.append((touched, self.arena.quarantine(ranges)))

    @precondition(lambda self: self.isolated)
    @rule(data=st.data())
    def lift(self, data: st.DataObject) -> None:
        _, lift = self.isolated.pop(data.draw(st.integers(0, len(self.isolated) - 1)))
        lift()
        self.lifted.append(lift)

    @precondition(lambda self: self.lifted)
    @rule(data=st.data())
    def lift_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.lifted))()

    @rule()
    def look(self) -> None:
        """Not an invariant: what comes and goes between two looks must come out right, too."""
        assert self.arena.available == len(self.free_blocks)
        assert self.arena.withheld == BLOCKS - len(self.held) - len(self.free_blocks)
        # private: callers cannot see whether the quarantine is looked at
        assert self.arena._is_watched == bool(self.isolated)
        isolated = set().union(*(blocks for blocks, _ in self.isolated))
        for block in range(BLOCKS):
            assert self.arena.is_quarantined([(block * BLOCK, 1)]) == (block in isolated)
        check_arena(self.arena)

    @invariant()
    def used_blocks_are_used(self) -> None:
        assert self.arena.allocator.allocated(sorted(self.held)).all()

    def teardown(self) -> None:
        self.look()
        for _, lift in self.isolated:
            lift()
        self.arena.free(sorted(self.held))
        assert self.arena.available == BLOCKS
        self.arena.close()


QuarantineMachine.TestCase.settings = settings(
    max_examples=example_count(150), stateful_step_count=30, deadline=None
)
TestQuarantine = QuarantineMachine.TestCase
