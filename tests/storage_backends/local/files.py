"""Files of a store on a disk: their size, and damage to them."""

from __future__ import annotations

import os
from pathlib import Path

DAMAGE = ("truncated", "to a page", "zeroed", "garbage", "garbage inside", "empty")


def damage(path: Path, how: str, rest: int | None = None) -> None:
    """Damage a file in one of the ways of `DAMAGE`; "truncated" leaves `rest` bytes, by default a third."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        match how:
            case "truncated":
                file.truncate(size // 3 if rest is None else rest)
            case "to a page":
                file.truncate(4096)
            case "zeroed":
                file.write(bytes(size))
            case "garbage":
                file.write(os.urandom(size))
            case "garbage inside":
                file.seek(8192)
                file.write(os.urandom(size - 8192))
            case _:
                assert how == "empty"
                file.truncate(0)


def disk_bytes(path: Path) -> int:
    """Return the bytes that a directory and its contents take on the disk; holes in files do not count."""
    return sum(p.lstat().st_blocks * 512 for p in [path, *path.rglob("*")])
