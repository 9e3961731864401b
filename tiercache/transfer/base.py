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
    """One transfer: pending at first, then done for good, with or without an error.

    Thread safety: any thread may ask, wait and add callbacks; `finish` belongs to the transfer engine, which calls it once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = False
        self._error: TransferError | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        """Return whether all bytes have landed or the transfer has failed; from then on no byte of source or destination is touched."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the transfer is done; False if `timeout` seconds pass first. Callbacks may still be running when it returns."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout)

    @property
    def error(self) -> TransferError | None:
        """Reason of a failure; None while the transfer is pending and after success. After a failure every destination is undefined."""
        return self._error

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(ticket)` exactly once when the transfer is done: on the engine's thread, or on this one at once if it is done already.

        `fn` must be short: it holds up the transfers behind this one. An exception that it raises is logged.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def finish(self, error: TransferError | None = None) -> None:
        """Mark the transfer as done, wake the waiting threads, then call the callbacks. For engines, once."""
        with self._changed:
            assert not self._done, "a ticket is finished once"
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        # Without the lock: a callback may use this ticket, or start another transfer.
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001  it is logged, and must not end the thread that serves the next transfers
            _log.exception("a callback of a transfer ticket raised")


class LayerTicket(Ticket):
    """The ticket of a load that lands layer by layer, in ascending order. `layers`: the layers that have bytes to wait for.

    Thread safety: as `Ticket`; `finish_layer` belongs to the engine too.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__()
        self.layers = tuple(sorted(set(layers)))
        self._pending = set(self.layers)

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:
        """Block until this thread may use `layer` of all pools, whose bytes have landed; False if `timeout` seconds pass first.

        `stream` is a device's handle of a stream (`torch.cuda.current_stream().cuda_stream`). With it, an engine for that device makes the
        stream wait and not the thread: the method returns as soon as work that is queued there from now on may use the layer. Other engines
        ignore it.

        For a layer without bytes in this load the method returns at once. Raises TransferError if the load failed before this layer landed.
        A copy that is queued already fails only together with the whole device, and with the work that waits for it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: layer not in self._pending or self._done, timeout):
                return False
            if layer in self._pending:
                raise TransferError(f"layer {layer} was not loaded: {self._error}") from self._error
        return True

    def finish_layer(self, layer: int) -> None:
        """Record that every byte of `layer` has landed. For engines."""
        with self._changed:
            self._pending.discard(layer)
            self._changed.notify_all()

    def finish(self, error: TransferError | None = None) -> None:
        """Mark the load as done; without an error all layers have landed. For engines, once."""
        with self._changed:
            if error is None:
                self._pending.clear()
        super().finish(error)


class TransferEngine(ABC):
    """Contract of an engine that copies objects between device slots and host handles.

    The caller guarantees:
    - until the ticket is done, both ends of every unit stay allocated, and nothing else uses them in a conflicting way;
    - no destination is named twice in a call;
    - `after` holds all work that must precede the copy: for a store the forward pass that may still write its slots, for a load the last
      use of its slots.

    A store and a load are not ordered with respect to each other; stores start in the order of their calls, and so do loads.

    The implementation must:
    - return at once, without waiting for a copy or a fence, and keep pools and memory referenced until the ticket is done;
    - write nothing but the payload bytes of the destinations; a host object's slack is zeroed by storage, before it is stored;
    - let a failure fail the ticket, never the process, and finish a ticket only when none of its bytes is touched any more;
    - raise SlotError at the call for an impossible slot or handle and ConfigError for a fence that cannot be waited for, with nothing
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

        On a device the copies take their place in the order of the work in `stream`, a handle of the device's; elsewhere they are over when
        the method returns. Raises TransferError if that is not possible; the destinations are undefined then.
        """

    def check_fences(self, fences: Sequence[Fence]) -> None:
        """Raise ConfigError for a fence that cannot be waited for, or that stands for nothing.

        The latter is, for example, a `torch.cuda.Event` that was never recorded.
        """
        checked_fences(fences)

    def order(self, fences: Sequence[Fence], *, stream: int | None = None) -> None:
        """Block until work may start that must come after these fences.

        With a device's `stream`, an engine for that device makes the stream wait and not the thread: the method returns as soon as work
        that is queued there from now on comes after the fences. Raises TransferError if that is not possible.
        """
        for fence in fences:
            pass_fence(fence)

    @abstractmethod
    def close(self, timeout: float = 30.0) -> None:
        """Finish all transfers; after `timeout` seconds, fail those that have not started and stop the others at their next layer.

        A second call is harmless.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
