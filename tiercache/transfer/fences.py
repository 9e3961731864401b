"""Fences: work that must be over before a copy may start, and the ways to wait for it."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from tiercache.errors import ConfigError

_LOOK_S: Final = 200e-6
"""Seconds between two queries of a fence that has no blocking wait."""


class Synchronizable(Protocol):
    """An event that a thread can wait for, such as `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Block until everything before the event is done."""


class Queryable(Protocol):
    """An event that can be queried."""

    def query(self) -> bool:
        """Return whether everything before the event is done."""


class Waitable(Protocol):
    """An object that a thread can wait for, such as `threading.Event`."""

    def wait(self) -> object:
        """Block until the awaited thing has happened."""


Fence: TypeAlias = Callable[[], object] | Synchronizable | Queryable | Waitable
"""Work that must be over before a copy may start.

A fence is waited for in the first of these ways that it offers: a call, `synchronize`, `query` until it returns True, `wait`. All run on a
thread of the transfer engine; if one raises, the ticket fails.

For a `torch.cuda.Event`, or any other object with a handle in `cuda_event`, an engine for CUDA makes the device wait and no thread. The
caller that passes one must not record it anew until the ticket is done.
"""


def checked_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Return the fences as a tuple.

    Raises ConfigError for a fence that cannot be waited for or stands for nothing, and for an argument that is no sequence of fences.
    """
    try:
        found = tuple(fences)
    except TypeError as error:
        raise ConfigError(f"`after` is a {type(fences).__name__}; give a sequence of fences, such as [event]") from error
    for fence in found:
        _check(fence)
    return found


def pass_fence(fence: Fence, go_on: Callable[[], object] = lambda: None) -> None:
    """Block until `fence` is over. `go_on` may raise to end the wait; it is called only between two queries."""
    how, wait = _way(fence)
    if how != "query":
        wait()
        return
    while not _said(wait()):
        go_on()
        time.sleep(_LOOK_S)


def event_of(fence: Fence) -> int | None:
    """Return the handle of a CUDA event, 0 for one that was never recorded; None for any other fence."""
    handle = getattr(fence, "cuda_event", None)
    try:
        return None if isinstance(handle, bool) else operator.index(handle)  # type: ignore[arg-type]  # None and others raise
    except TypeError:
        return None


def _check(fence: Fence) -> None:
    event = event_of(fence)
    if event == 0 or (event is None and getattr(fence, "event_id", None) == 0):  # it stands for nothing: a wait for it would return at once
        raise ConfigError("a fence is an event that was never recorded; record it in the stream whose work comes first")
    if event is not None and not 0 < event < 1 << 64:
        raise ConfigError(f"a fence has {event} for its cuda_event, which is no handle of an event")
    if event is not None:
        return
    how, wait = _way(fence)
    if isinstance(fence, type) or not how or inspect.iscoroutinefunction(wait):
        raise ConfigError(
            f"a fence is {_described(fence)}, which a thread cannot wait for; pass a recorded event, a function that returns when the work "
            "is over, or an object with `synchronize`, `query` or `wait`"
        )


def _way(fence: Fence) -> tuple[str, Callable[[], Any]]:
    """Return the name of the way to wait for a fence, and the call for it; an empty name if there is none."""
    if callable(fence):
        return "call", fence
    for how in ("synchronize", "query", "wait"):
        if callable(wait := getattr(fence, how, None)):
            return how, wait
    return "", lambda: None


def _said(answer: object) -> bool:
    if not isinstance(answer, bool | np.bool_):  # CUDA's own answers are error codes, in which 0 means done
        raise TypeError(f"the query of a fence said {answer!r}; it must say True or False")
    return bool(answer)


def _described(fence: object) -> str:
    return f"the class {fence.__name__}" if isinstance(fence, type) else f"of type {type(fence).__name__}"
