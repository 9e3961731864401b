"""Calibrations in files: a device is measured once for each set of methods, and again when its file is invalid or proved wrong."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiercache.transfer.cuda.calibration import MOST_BYTES, Calibration, Cell, calibrate
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method

_log = logging.getLogger(__name__)

FORMAT: Final = 2
"""Version of the file's format; also raised when the speed of one of our methods changes."""
_MOST_FILE_BYTES: Final = 1 << 20


def calibrated(device: CudaDevice, directory: Path | None = None, *, nbytes: int = MOST_BYTES) -> tuple[Calibration, str]:
    """Return the calibration from the file in `directory`, or measure one now and write the file; and in words, which of the two.

    A file that cannot be read, or is of another device, driver or set of methods, is replaced. If the file cannot be written, the next
    start measures again. Processes that start together each measure; files are replaced atomically, and the last one stays.
    """
    path = calibration_path(device.card, device.methods, directory)
    known = read_calibration(path)
    if known is not None and _key(known.card, device.methods) == _key(device.card, device.methods) and _covers(known, device.methods):
        return known, f"calibration from {path}"
    started = time.monotonic()
    found = calibrate(device, nbytes=nbytes)
    how = f"calibrated in {time.monotonic() - started:.1f} s"
    try:
        _write(path, found)
    except OSError as error:
        _log.warning("the calibration of copies could not be kept in %s: %s", path, error)
    return found, how


def forget_calibration(wrong: Calibration, methods: Sequence[Method], directory: Path | None = None) -> None:
    """Remove the file of a wrong calibration, so that the next start measures anew; another process's newer file stays."""
    path = calibration_path(wrong.card, methods, directory)
    known = read_calibration(path)
    try:
        if known is not None and known.cells == wrong.cells:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be removed, though copies are no longer as fast as it says: %s", path, error)


def calibration_directory() -> Path:
    """Return the directory of calibrations: TIERCACHE_CACHE_DIR, else tiercache/ in XDG_CACHE_HOME, else ~/.cache/tiercache."""
    if chosen := os.environ.get("TIERCACHE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache"


def calibration_path(card: Card, methods: Sequence[Method], directory: Path | None = None) -> Path:
    """Return the file of one card, driver and set of methods. Its name is a digest, for device names may hold any characters."""
    digest = blake3(json.dumps(_key(card, methods)).encode()).hexdigest(length=8)
    return (directory or calibration_directory()) / f"calibration-{digest}.json"


def read_calibration(path: Path) -> Calibration | None:
    """Return the calibration in a file; None if the file is missing, cannot be read or is not a calibration."""
    try:
        # O_NONBLOCK: opening a named pipe for reading would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1) or b""
            document = _Document.model_validate_json(text if len(text) <= _MOST_FILE_BYTES else b"")
    except OSError:
        return None
    except ValidationError as error:
        _log.warning("%s is not a calibration and will be replaced: %s", path, error.errors()[0]["msg"])
        return None
    return document.calibration()


def _write(path: Path, calibration: Calibration) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = _Document.of(calibration).model_dump_json(indent=1)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:  # on the same file system, and removed even after an error
        (Path(directory) / path.name).write_text(document)
        (Path(directory) / path.name).replace(path)


def _key(card: Card, methods: Sequence[Method]) -> list[object]:
    """Return what identifies a calibration. A device without a UUID, which old drivers do not tell, goes by its name and bus address."""
    return [card.uuid or f"{card.name} at {card.bus}", card.driver, sorted(methods)]


def _covers(calibration: Calibration, methods: Sequence[Method]) -> bool:
    """Return whether a calibration has cells for both directions, each with speeds of exactly these methods."""
    return {c.direction for c in calibration.cells} == set(Direction) and all(c.speeds.keys() == set(methods) for c in calibration.cells)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=1, le=1 << 40)]


class _CellDocument(_Strict):
    direction: Annotated[Direction, Field(strict=False)]
    length: _Count
    count: _Count
    gb_s: dict[Annotated[Method, Field(strict=False)], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)


class _CardDocument(_Strict):
    name: str
    bus: str
    driver: int
    runtime: int
    multiprocessors: _Count
    uuid: str


class _Document(_Strict):
    """Content of a calibration's file."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    card: _CardDocument
    cells: Annotated[list[_CellDocument], Field(max_length=1000)]

    @classmethod
    def of(cls, calibration: Calibration) -> _Document:
        cells = [_CellDocument(direction=c.direction, length=c.length, count=c.count, gb_s=dict(c.speeds)) for c in calibration.cells]
        return cls(format=FORMAT, card=_CardDocument(**asdict(calibration.card)), cells=cells)

    def calibration(self) -> Calibration:
        """Return the calibration that the file describes."""
        cells = [Cell(c.direction, c.length, c.count, c.gb_s) for c in self.cells]
        return Calibration(Card(**self.card.model_dump()), cells)
