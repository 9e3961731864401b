"""Contract of a transfer engine, and the tickets by which its callers follow a copy."""

from __future__ import annotations

import logging
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

from tiercache.core import CacheTransferUnits
from tiercache.errors import ConfigError, TransferError

_log = logging.getLogger(__name__)


class Fence(Protocol):
    """A point in the device's work that copies wait for, such as a recorded `torch.cuda.Event`.

    A fence with a handle in `cuda_event` needs no thread: an engine for CUDA makes the device wait. The
    caller must not record such an event again until the ticket is done. For other fences, a thread of the
    engine calls `synchronize`; if that raises, the ticket fails.
    """

    def query(self) -> bool:
        """Return whether the device has passed this point."""

    def synchronize(self) -> object:
        """Block until the device has passed this point."""


def checked_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Return the fences as a tuple.

    Raises ConfigError for an object that is no fence, for an event that was never recorded, and for an
    argument that is not a sequence of fences.
    """
    try:
        found = tuple(fences)
    except TypeError as error:
        raise ConfigError(
            f"`after` is a {type(fences).__name__}; give a sequence of fences, such as [event]"
        ) from error
    for fence in found:
        _check(fence)
    return found


def event_of(fence: Fence) -> int | None:
    """Return the handle of a CUDA event (0 if it was never recorded), or None for any other fence."""
    handle = getattr(fence, "cuda_event", None)
    try:
        # `operator.index` raises TypeError for None and for anything else that is no integer
        return None if isinstance(handle, bool) else operator.index(handle)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check(fence: Fence) -> None:
    event = event_of(fence)
    # A wait for an event that was never recorded would return at once. Such a `torch.cuda.Event` has 0 as its
    # `cuda_event`, and such a `torch.Event` has 0 as its `event_id`.
    if event == 0 or (event is None and getattr(fence, "event_id", None) == 0):
        raise ConfigError(
            "a given fence is an event that was never recorded; record it in the stream whose work comes"
            " first"
        )
    if event is not None and not 0 < event < 1 << 64:
        raise ConfigError(f"a given fence has {event} as its cuda_event, which is not the handle of an event")
    if event is None and not all(callable(getattr(fence, way, None)) for way in ("query", "synchronize")):
        raise ConfigError(
            f"a given fence is of type {type(fence).__name__}, which cannot be waited for; pass a recorded"
            " event, or an object with `query` and `synchronize`"
        )


class Ticket:
    """One transfer: pending at first, then done, with or without an error. A done ticket never changes.

    Thread safety: any thread may ask, wait and add callbacks; `finish` belongs to the transfer engine, which
    calls it once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = False
        self._error: TransferError | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        """Return whether all bytes have landed or the transfer has failed.

        A done transfer no longer touches any byte of its sources or destinations.
        """
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the transfer is done; return False if `timeout` seconds pass first.

        Callbacks may still be running when this method returns.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout)

    @property
    def error(self) -> TransferError | None:
        """Reason of a failure; None while the transfer is pending and after success.

        After a failure every destination is undefined.
        """
        return self._error

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(ticket)` exactly once when the transfer is done, at once if it is done already.

        `fn` runs on a thread of the engine, or on the caller's thread if the transfer is done already. `fn`
        must be short, because later transfers wait for it. If `fn` raises, the exception is logged.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def finish(self, error: TransferError | None = None) -> None:
        """Mark the transfer as done, wake the waiting threads, then call the callbacks.

        An engine calls this once.
        """
        with self._changed:
            assert not self._done, "a ticket is finished once"
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        # Callbacks run without the lock, because a callback may use this ticket or start another transfer.
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001
            # an exception must not end the engine's thread, which serves the next transfers
            _log.exception("a callback of a transfer ticket raised")


class LayerTicket(Ticket):
    """Ticket of a load whose layers land one by one, in ascending order.

    `layers` are the layers of which the load has bytes to copy.

    Thread safety: as `Ticket`; `finish_layer` belongs to the engine, as `finish` does.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__()
        self.layers = tuple(sorted(set(layers)))
        self._pending = set(self.layers)

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:
        """Block until `layer` has landed in all pools; return False if `timeout` seconds pass first.

        `stream` is a device's handle of a stream (`torch.cuda.current_stream().cuda_stream`). With `stream`,
        an engine for that device makes the stream wait for the layer, and not the calling thread. The method
        then returns as soon as the copies are queued, and work queued in the stream afterwards may use the
        layer. Other engines ignore `stream`.

        If this load has no bytes of `layer`, the method returns at once. Raises TransferError if the load
        failed before this layer landed. The method cannot report that a copy fails after the stream began to
        wait for it. Such a copy fails only if the whole device fails, and then the work in the stream fails
        too.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: layer not in self._pending or self._done, timeout):
                return False
            if layer in self._pending:
                raise TransferError(f"layer {layer} was not loaded: {self._error}") from self._error
        return True

    def finish_layer(self, layer: int) -> None:
        """Record that every byte of `layer` has landed. The engine calls this."""
        with self._changed:
            self._pending.discard(layer)
            self._changed.notify_all()

    def finish(self, error: TransferError | None = None) -> None:
        """Mark the load as done. Without an error, all its layers have landed. An engine calls this once."""
        with self._changed:
            if error is None:
                self._pending.clear()
        super().finish(error)


class TransferEngine(ABC):
    """Contract of an engine that copies objects between device slots and host handles.

    The caller guarantees:
    - until the ticket is done, sources and destinations stay allocated;
    - until the ticket is done, nothing writes to a source, and only the copy touches a destination;
    - no destination is named twice in a call;
    - `after` has a fence for all work that must precede the copy. For a store, this is the forward pass
      that may still write to the slots. For a load, this is the last use of the slots.

    Stores start in the order of their calls, and so do loads. A store and a load may run at the same time.

    The implementation must:
    - return from `store` and `load` at once, without waiting for a copy or a fence;
    - keep pools and memory referenced until the ticket is done;
    - write only the payload bytes of the destinations. (Storage zeroes the unused end of a host object's last
      block before it stores the object);
    - report a failure by the ticket, and never end the process;
    - finish a ticket only when no copy touches its sources or destinations any more;
    - raise errors of the arguments at the call, with nothing started: SlotError for an impossible slot or
      handle, ConfigError for a fence that cannot be waited for, and ClosedError after `close`.

    Thread safety: `store`, `load` and `close` may be called from any thread.
    """

    @abstractmethod
    def store(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> Ticket:
        """Copy device slots (`sources`) to host handles (`destinations`)."""

    @abstractmethod
    def load(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> LayerTicket:
        """Copy host handles (`sources`) to device slots (`destinations`), layer by layer."""

    def check_fences(self, fences: Sequence[Fence]) -> None:
        """Raise ConfigError for a fence that cannot be waited for, or was never recorded.

        A wait for a `torch.cuda.Event` that was never recorded would return at once.
        """
        checked_fences(fences)

    def order(self, fences: Sequence[Fence], *, stream: int | None = None) -> None:
        """Block until these fences have passed, so that later work may start.

        With `stream`, a device's handle of a stream, an engine for that device makes the stream wait, and not
        the calling thread. The method then returns at once, and work queued in the stream afterwards starts
        after the fences. Raises TransferError if a fence cannot be waited for.
        """
        for fence in fences:
            fence.synchronize()

    @abstractmethod
    def close(self, timeout: float = 30.0) -> None:
        """Close the engine, after waiting up to `timeout` seconds for all transfers to finish.

        After this time, transfers that have not started fail, and the others stop at their next layer. A
        second call is harmless.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
