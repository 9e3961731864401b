"""Harm to the files of a store, by what they hold."""

from __future__ import annotations

from pathlib import Path


def flip(directory: Path, needle: bytes) -> None:
    """Turn one bit inside the only place that holds these bytes."""
    path, at = _found(directory, needle)
    with path.open("r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 1]))


def truncate(directory: Path, needle: bytes) -> None:
    """Cut a file off in the midst of these bytes."""
    path, at = _found(directory, needle)
    with path.open("r+b") as file:
        file.truncate(at + 5)


def _found(directory: Path, needle: bytes) -> tuple[Path, int]:
    places = [(path, path.read_bytes().find(needle)) for path in directory.rglob("*") if path.is_file()]
    [place] = [(path, at) for path, at in places if at >= 0]
    return place
