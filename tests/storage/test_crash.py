"""The power cuts that `CrashEnv` makes: what they may take, what they may not, and that they do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.crash import SECTOR, CrashEnv

OLD, NEW = b"o" * (8 * SECTOR), b"n" * (8 * SECTOR)
SEEDS = range(60)


class Disk:
    """A directory with an env, and what its cuts leave."""

    def __init__(self, path: Path) -> None:
        self.env = CrashEnv()
        self.path = path
        self.root = path / "root"
        self.root.mkdir()
        self.cuts = 0

    def open(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        return self.env.open(str(self.root / name), flags)

    def write(self, fd: int, data: bytes, offset: int = 0) -> None:
        assert self.env.pwritev(fd, [memoryview(data)], offset) == len(data)

    def sync_names(self, name: str = ".") -> None:
        fd = self.env.open(str(self.root / name), os.O_RDONLY | os.O_DIRECTORY)
        self.env.fsync(fd)
        self.env.close(fd)

    def settled(self, name: str, data: bytes) -> int:
        fd = self.open(name)
        self.write(fd, data)
        self.env.fdatasync(fd)
        self.sync_names()
        return fd

    def left(self, seed: int) -> dict[str, bytes | None]:
        """Files with their contents, and directories, after a cut."""
        self.cuts += 1
        target = self.path / f"left{self.cuts}"
        self.env.clone(self.root, target, seed)
        return {
            str(p.relative_to(target)): None if p.is_dir() else p.read_bytes()
            for p in sorted(target.rglob("*"))
        }

    def ways(self) -> list[dict[str, bytes | None]]:
        """Every different result of many seeds."""
        found: list[dict[str, bytes | None]] = []
        for seed in SEEDS:
            if (left := self.left(seed)) not in found:
                found.append(left)
        return found


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def sectors(data: bytes) -> list[bytes]:
    return [data[i : i + SECTOR] for i in range(0, len(data), SECTOR)]


def test_a_write_is_kept_or_lost_or_tears_at_sectors(disk: Disk) -> None:
    disk.write(disk.settled("a", OLD), NEW)
    ways = [left["a"] for left in disk.ways()]
    assert OLD in ways
    assert NEW in ways
    torn = [data for data in ways if data not in (OLD, NEW)]
    assert torn
    assert all(data and set(sectors(data)) == {OLD[:SECTOR], NEW[:SECTOR]} for data in torn)


def test_any_of_several_writes_to_one_place_may_be_the_last_that_arrived(disk: Disk) -> None:
    fd = disk.settled("a", OLD)
    versions = [OLD, *(bytes([n]) * len(OLD) for n in range(3))]
    for data in versions[1:]:
        disk.write(fd, data)
    assert {left["a"] for left in disk.ways()} >= set(versions)
    disk.env.fdatasync(fd)
    assert disk.ways() == [{"a": versions[-1]}]


def test_sizes_change_in_order_and_without_a_sync_perhaps_not_at_all(disk: Disk) -> None:
    fd = disk.settled("a", OLD)
    disk.env.fallocate(fd, len(OLD), len(OLD))
    disk.write(fd, NEW, len(OLD))
    disk.env.ftruncate(fd, SECTOR)
    ways = [left["a"] for left in disk.ways()]
    assert {len(data or b"") for data in ways} == {len(OLD), 2 * len(OLD), SECTOR}
    assert all(data is not None and data[:SECTOR] == OLD[:SECTOR] for data in ways)
    assert all(data == OLD for data in ways if data is not None and len(data) == len(OLD))
    assert OLD + NEW in ways
    assert OLD + bytes(len(OLD)) in ways
    disk.env.fsync(fd)
    assert disk.ways() == [{"a": OLD[:SECTOR]}]


def test_names_come_and_go_in_order(disk: Disk) -> None:
    disk.settled("a", OLD)
    disk.settled("b", NEW)
    disk.env.rename(str(disk.root / "a"), str(disk.root / "b"))
    disk.env.mkdir(str(disk.root / "d"))
    disk.env.close(disk.open("d/e"))
    disk.env.unlink(str(disk.root / "b"))
    stages: list[dict[str, bytes | None]] = [
        {"a": OLD, "b": NEW}, {"b": OLD}, {"b": OLD, "d": None}, {"b": OLD, "d": None, "d/e": b""},
        {"d": None, "d/e": b""},
    ]  # fmt: skip
    ways = disk.ways()
    assert all(way in stages for way in ways)
    assert all(stage in ways for stage in stages)
    disk.sync_names("d")
    assert {str(w) for w in disk.ways()} == {str(s) for s in stages[3:]}, "with every earlier name"
    disk.sync_names()
    assert disk.ways() == stages[4:]


def test_a_renamed_directory_takes_its_files_along(disk: Disk) -> None:
    disk.env.mkdir(str(disk.root / "d"))
    (disk.root / "d" / "foreign").write_bytes(OLD)
    disk.sync_names()
    disk.env.rename(str(disk.root / "d"), str(disk.root / "e"))
    assert {str(w) for w in disk.ways()} == {
        str({"d": None, "d/foreign": OLD}),
        str({"e": None, "e/foreign": OLD}),
    }


def test_the_sync_of_a_file_is_not_that_of_its_name(disk: Disk) -> None:
    fd = disk.open("a")
    disk.write(fd, OLD)
    disk.env.fsync(fd)
    assert {str(w) for w in disk.ways()} == {str({}), str({"a": OLD})}


def test_a_file_of_a_directory_that_is_lost_is_lost(disk: Disk) -> None:
    disk.env.mkdir(str(disk.root / "d"))
    (disk.root / "d" / "foreign").write_bytes(OLD)
    assert {str(w) for w in disk.ways()} == {str({}), str({"d": None, "d/foreign": OLD})}


def test_a_file_that_was_cut_by_its_opening_may_be_whole(disk: Disk) -> None:
    disk.settled("a", OLD)
    disk.open("a", os.O_WRONLY | os.O_TRUNC)
    assert {left["a"] for left in disk.ways()} == {OLD, b""}


def test_a_sync_that_fails_makes_nothing_durable(disk: Disk) -> None:
    fd = disk.settled("a", OLD)
    disk.write(fd, NEW)
    disk.env.fail("fdatasync")
    with pytest.raises(OSError, match="Input/output"):
        disk.env.fdatasync(fd)
    assert OLD in [left["a"] for left in disk.ways()]


def test_a_name_that_could_not_be_removed_loses_nothing(disk: Disk) -> None:
    fd = disk.settled("a", OLD)
    disk.write(fd, NEW)
    disk.env.fail("unlink", error=errno.EROFS)
    with pytest.raises(OSError, match="Read-only"):
        disk.env.unlink(str(disk.root / "a"))
    assert OLD in [left["a"] for left in disk.ways()]


@pytest.mark.parametrize(("after", "expected"), [(False, {OLD}), (True, {OLD, NEW})])
def test_a_cut_in_the_middle_of_a_call(disk: Disk, after: bool, expected: set[bytes]) -> None:
    fd = disk.settled("a", OLD)
    ways: list[dict[str, bytes | None]] = []
    disk.env.at_call("pwritev", 2, lambda: ways.extend(disk.ways()), after=after)
    disk.write(fd, OLD)
    disk.env.fdatasync(fd)
    disk.write(fd, NEW)
    assert {left["a"] for left in ways} >= expected
    assert after or {left["a"] for left in ways} == expected
