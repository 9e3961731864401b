"""Trial of every copy method on a device, before the first byte of a cache is moved by it."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.pools.arena import HostArena
from tiercache.transfer.cuda.copying import CopySet, bus_blocks
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.cuda.locked import LockedArena
from tiercache.transfer.descriptors import Descriptors

_log = logging.getLogger(__name__)

_PROVEN: Final[WeakSet[CudaDevice]] = WeakSet()
_BYTES: Final = 2 << 20
"""Bytes of each buffer of the trial."""
_PIECE_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_LENGTHS: Final = (1, 15, 16, 17, 255, 4096, 4099, 65536, 65543, 1 << 20)
"""Bytes of each copy; the last one goes across the end of a page-locked piece."""
_SENT: Final = 33
_DEVICE: Final = 21
_BACK: Final = 43
"""Bytes between two copies in each buffer, so that both ends have all alignments to a vector, and to each other."""


def prove(device: CudaDevice) -> None:
    """Copy to the device and back by each method, and compare all bytes on the device and on the host.

    A method that fails or copies wrongly is added to `device.unavailable`. A device that has passed is not tried again. Raises ConfigError
    if no method is left.

    Thread safety: one thread, with the device current.
    """
    if device in _PROVEN:
        return
    with ExitStack() as stack:
        trial = _Trial(device, stack)
        for method in [m for m in Method if m not in device.unavailable]:
            try:
                trial.run(method)
            except Exception as error:  # noqa: BLE001  whatever the driver says, this method is not for us
                device.unavailable[method] = str(error) or type(error).__name__
                _log.warning("copies by %s are not used on %s: %s", method, device.card, device.unavailable[method])
                device.synchronize_stream(trial.stream)  # the next method's trial uses the same memory
    if len(device.unavailable) == len(Method):
        raise ConfigError(f"no way to copy between {device.card} and the host works: {device.unavailable[Method.MEMCPY]}")
    _PROVEN.add(device)


class _Trial:
    """Buffers and resources of the trials: one buffer on the device, two in an arena that is page-locked in pieces as a worker's is.

    A fourth buffer, in host memory that the driver allocates, receives the device's bytes for the comparison. Random bytes are drawn anew
    for each run, for bytes that an earlier run left would prove nothing.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, stack: ExitStack) -> None:
        self._device, self._rng = device, np.random.default_rng()
        self.stream = device.create_stream(urgent=False)
        stack.callback(device.destroy_stream, self.stream)
        self._address = device.allocate(_BYTES)
        stack.callback(device.release, self._address)
        self._resources = CopySet(device)
        stack.callback(self._resources.destroy)
        self._there = device.allocate_host(_BYTES)
        self._arena = stack.enter_context(closing(HostArena(2 * _BYTES, _BLOCK_BYTES, huge_pages=False)))
        self._locked = _page_locked(self._arena, device)
        stack.callback(self._locked.unlock)
        self._sent, self._back = np.frombuffer(self._arena.hold(), np.uint8).reshape(2, _BYTES)
        stack.callback(device.synchronize_stream, self.stream)

    def run(self, method: Method) -> None:
        """Try one method. Raises RuntimeError if a byte is wrong, on the device or back on the host, between the copies too."""
        for memory in (self._sent, self._there, self._back):
            memory[:] = np.frombuffer(self._rng.bytes(_BYTES), np.uint8)
        expected = [self._there.copy(), self._back.copy()]
        starts = (_SENT, _DEVICE, _BACK)
        for target, source, begin, end in zip(expected, (self._sent, expected[0]), starts[:-1], starts[1:], strict=True):
            for there, here, length in zip(_places(end).tolist(), _places(begin).tolist(), _LENGTHS, strict=True):
                target[there : there + length] = source[here : here + length]
        self._device.copy(self._there.ctypes.data, self._address, _BYTES, self.stream)
        self._copy(method, _places(_SENT, self._sent.ctypes.data), to_host=False)
        self._copy(method, _places(_BACK, self._back.ctypes.data), to_host=True)
        self._device.copy(self._address, self._there.ctypes.data, _BYTES, self.stream)
        self._device.synchronize_stream(self.stream)
        wrong = sum(int((found != right).sum()) for found, right in zip((self._there, self._back), expected, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {2 * _BYTES} bytes were wrong in a trial")

    def _copy(self, method: Method, host: npt.NDArray[np.uint64], *, to_host: bool) -> None:
        whole = Descriptors(_places(_DEVICE, self._address), host, np.array(_LENGTHS), np.zeros(len(_LENGTHS), np.int64))
        copies = self._locked.seen(whole.cut(self._arena.address, self._locked.period)).copies(to_host=to_host)
        rows = slice(0, len(copies))
        self._resources.queue(copies, [(rows, method)], bus_blocks(self._device.card.multiprocessors), self.stream).put(rows, method)
        self._device.synchronize_stream(self.stream)


def _page_locked(arena: HostArena, device: CudaDevice) -> LockedArena:
    try:
        return LockedArena(arena, device, _PIECE_BYTES)
    except ConfigError as error:
        raise ConfigError(
            f"{device.card} cannot be used: not even {arena.nbytes >> 20} MiB are page-locked for it ({error.__cause__})"
        ) from error


def _places(step: int, base: int = 0) -> npt.NDArray[np.uint64]:
    """Return where the copies start: `step` bytes behind `base`, then each `step` bytes behind the end of the copy before.

    `step` is odd, so that no vector length divides it.
    """
    ends = np.cumsum(np.array(_LENGTHS) + step)
    starts: npt.NDArray[np.int64] = base + ends - np.array(_LENGTHS)
    return starts.astype(np.uint64)
