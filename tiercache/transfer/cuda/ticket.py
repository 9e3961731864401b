"""The ticket of a load whose layers are followed by events on a device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from tiercache.errors import TransferError
from tiercache.transfer.base import LayerTicket
from tiercache.transfer.cuda.device import CudaDevice

_LOOK_S: Final = 200e-6
"""Seconds between two queries of an event by a thread that waits for one layer: a fraction of the time that a layer takes."""


class CudaLayerTicket(LayerTicket):
    """A `LayerTicket` whose `wait_layer` with a stream makes that stream wait, once the copies of the layer are queued.

    Thread safety: as `LayerTicket`; `queued` belongs to the engine.
    """

    def __init__(self, layers: Iterable[int], device: CudaDevice) -> None:
        super().__init__(layers)
        self._device = device
        self._events: dict[int, int] = {}

    def queued(self, layers: Iterable[int], event: int) -> None:
        """Record that the copies of `layers` are in the stream; `event` stands for them until the ticket is done. For engines."""
        with self._changed:
            self._events |= dict.fromkeys(layers, event)
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:  # noqa: D102
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            # Before an event is recorded it stands for nothing, and a wait for it returns at once.
            if not self._changed.wait_for(lambda: self._done or layer not in self._pending or layer in self._events, timeout):
                return False
            # The lock is kept from here on: once the ticket is done its events may stand for another load, or be gone.
            while not self._done and layer in self._events:
                if stream is not None:
                    self._let_wait(stream, layer)
                    return True
                if self._has_passed(layer):
                    return True
                left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return super().wait_layer(layer, 0)

    def _has_passed(self, layer: int) -> bool:
        with self._on_device(layer):
            return self._device.has_passed(self._events[layer])

    def _let_wait(self, stream: int, layer: int) -> None:
        with self._on_device(layer):  # the handle of a default stream means that of the current device
            self._device.wait_event(stream, self._events[layer])

    @contextmanager
    def _on_device(self, layer: int) -> Iterator[None]:
        """Make the device current on the caller's thread, which may use another device or none; turns RuntimeError into TransferError."""
        try:
            with self._device.current():
                yield
        except RuntimeError as error:
            raise TransferError(f"layer {layer} cannot be waited for: {error}") from error
