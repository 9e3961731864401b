"""Before the first byte of anybody's cache moves: does every method copy right here?"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.transfer.cuda.copying import CopySet, bus_blocks
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.descriptors import Copies

_log = logging.getLogger(__name__)

_BYTES: Final = 4 << 20
_LENGTHS: Final = (1, 15, 16, 17, 255, 4096, 4099, 65536, 65543, 1 << 20)
"""Bytes a copy."""
_SENT: Final = 33
_DEVICE: Final = 21
_BACK: Final = 43
"""Bytes between two copies, so that both ends have all alignments to a vector, and to each other."""


def prove(device: CudaDevice) -> None:
    """Copy to the device and back by each method, and compare all bytes. One that fails or differs joins `device.unavailable`.

    ConfigError if none is left. Thread rule: one thread, with the device current.
    """
    stream, resources = device.create_stream(urgent=False), CopySet(device)
    sent, back, address = device.allocate_host(_BYTES), device.allocate_host(_BYTES), device.allocate(_BYTES)
    sent[:] = np.random.default_rng(0).integers(1, 256, _BYTES, np.uint8)
    expected = np.zeros(_BYTES, np.uint8)
    for begin, end, length in zip(_places(_SENT), _places(_BACK), _LENGTHS, strict=True):
        expected[end : end + length] = sent[begin : begin + length]
    lengths, on_device = np.array(_LENGTHS), _places(_DEVICE, address)
    there = Copies(_places(_SENT, sent.ctypes.data), on_device, lengths)
    and_back = Copies(on_device, _places(_BACK, back.ctypes.data), lengths)
    try:
        for method in [m for m in Method if m not in device.unavailable]:
            back[:] = 0
            try:
                for copies in (there, and_back):
                    rows = slice(0, len(copies))
                    resources.queue(copies, [(rows, method)], bus_blocks(device.card.multiprocessors), stream).put(rows, method)
                    device.synchronize_stream(stream)
                if wrong := int((back != expected).sum()):
                    raise RuntimeError(f"{wrong} of {_BYTES} bytes were wrong in a trial")
            except Exception as error:  # noqa: BLE001  whatever the driver says, this method is not for us
                device.unavailable[method] = str(error) or type(error).__name__
                _log.warning("copies by %s are not used on %s: %s", method, device.card, device.unavailable[method])
    finally:
        device.synchronize_stream(stream)
        resources.destroy()
        device.release(address)
        device.destroy_stream(stream)
    if len(device.unavailable) == len(Method):
        raise ConfigError(f"no way to copy between {device.card} and the host works: {device.unavailable[Method.MEMCPY]}")


def _places(step: int, base: int = 0) -> npt.NDArray[np.uint64]:
    """Where the copies lie, `step` bytes and more apart, in units that no vector divides."""
    ends = np.cumsum(np.array(_LENGTHS) + step)
    starts: npt.NDArray[np.int64] = base + ends - np.array(_LENGTHS)
    return starts.astype(np.uint64)
