"""The contract of a transfer engine, and the tickets by which its callers follow a copy."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from tiercache.core import CacheTransferUnits
from tiercache.errors import TransferError
from tiercache.transfer.fences import Fence, checked_fences, pass_fence

_log = logging.getLogger(__name__)


class Ticket:
    """One transfer under way: pending, then done, for good, with or without an error.

    Thread safety: any thread may ask, wait and add callbacks; `finish` belongs to the transfer engine, which calls it once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = False
        self._error: TransferError | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        """Have all bytes landed, or has the transfer failed? After this no byte of source or destination is touched any more."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until done; False if `timeout` seconds pass first. Callbacks may still be running when it returns."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout)

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it is pending and after success. After a failure every destination is undefined."""
        return self._error

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(ticket)` exactly once when done: on the engine's own thread, or at once on this one if done already.

        `fn` must be short: it holds up the transfers behind this one. What it raises is logged.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def finish(self, error: TransferError | None = None) -> None:
        """For engines: the transfer is over. Wakes the waiters, then calls the callbacks."""
        with self._changed:
            assert not self._done, "a ticket is finished once"
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        # Without the lock: a callback may ask this ticket, or start another transfer.
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001  it is logged, and must not end the thread that serves the next transfers
            _log.exception("a callback of a transfer ticket raised")


class LayerTicket(Ticket):
    """A load that lands layer by layer, in ascending order. `layers`: those that have bytes to wait for.

    Thread safety: as `Ticket`; `finish_layer` belongs to the engine too.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__()
        self.layers = tuple(sorted(set(layers)))
        self._pending = set(self.layers)

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:
        """Return when this thread may use `layer` of all pools: its bytes have landed; False if `timeout` seconds pass first.

        With `stream`, a device's own handle of a queue of work (`torch.cuda.current_stream().cuda_stream`): when work that is queued there
        from now on may use the layer. An engine for that device then makes the queue wait and not the thread; others ignore it.

        A layer without bytes in this load returns at once. Raises TransferError if the load failed before this layer landed. A copy that is
        queued already fails only together with the whole device, and with the work that waits for it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: layer not in self._pending or self._done, timeout):
                return False
            if layer in self._pending:
                raise TransferError(f"layer {layer} was not loaded: {self._error}") from self._error
        return True

    def finish_layer(self, layer: int) -> None:
        """For engines: every byte of `layer` has landed."""
        with self._changed:
            self._pending.discard(layer)
            self._changed.notify_all()

    def finish(self, error: TransferError | None = None) -> None:
        """For engines: the load is over; without an error all layers have landed."""
        with self._changed:
            if error is None:
                self._pending.clear()
        super().finish(error)


class TransferEngine(ABC):
    """Copies objects between device slots and host handles.

    The caller guarantees: both ends of every unit are allocated, and stay so and are used by nobody else in a conflicting way, until the
    ticket is done; no destination is named twice in a call; what must happen before the copy is in `after`: a store waits for the forward
    pass that may still write its slots, a load for whoever used its slots last. A store and a load are not ordered among each other; stores
    start in the order of their calls, and so do loads.

    The implementation must:
    - return at once, without waiting for a copy or a fence, and keep pools and memory referenced until the ticket is done;
    - write nothing but the payload bytes of the destinations; a host object's slack is zeroed by storage, before it is stored;
    - let a failure fail the ticket, never the process, and end a ticket only when none of its bytes is touched any more;
    - raise SlotError at the call for a slot or handle that cannot be and ConfigError for a fence that cannot be waited for, with nothing
      started, and ClosedError after `close`.

    Thread safety: `store`, `load` and `close` may be called from any thread; `fork` belongs to the thread that computes.
    """

    @abstractmethod
    def store(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> Ticket:
        """Copy device slots (`sources`) to host handles (`destinations`)."""

    @abstractmethod
    def load(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> LayerTicket:
        """Copy host handles (`sources`) to device slots (`destinations`), layer by layer."""

    @abstractmethod
    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:
        """Copy device slots (`sources`) to other slots of the same pools (`destinations`), so that a state can be written without its copy.

        On a device in the order of the work in `stream`, its own handle; else before it returns. Raises TransferError if that cannot be;
        the destinations are undefined then.
        """

    def check_fences(self, fences: Sequence[Fence]) -> None:
        """ConfigError for a fence that cannot be waited for, or stands for nothing as a `torch.cuda.Event` that was never recorded does."""
        checked_fences(fences)

    def order(self, fences: Sequence[Fence], *, stream: int | None = None) -> None:
        """Return once work may start that has to come behind these fences; with a device's `stream`, once what is queued there may.

        An engine for that device makes the queue wait and not the thread. Raises TransferError if that cannot be.
        """
        for fence in fences:
            pass_fence(fence)

    @abstractmethod
    def close(self, timeout: float = 30.0) -> None:
        """Finish what was asked for; after `timeout` seconds, fail what has not started and stop the rest at its next layer.

        Twice is harmless.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
