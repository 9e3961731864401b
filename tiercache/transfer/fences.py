"""Fences and ways to wait for them. A fence stands for work that must be over before a copy may start."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from tiercache.errors import ConfigError

_POLL_S: Final = 200e-6
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

A thread of the transfer engine waits in the first of these ways that the fence offers:

1. Call the fence itself.
2. Call `synchronize()`.
3. Call `query()` until it returns True.
4. Call `wait()`.

If the call raises, the ticket fails.

A `torch.cuda.Event`, like any other object with a handle in `cuda_event`, needs no thread: an engine for CUDA
makes the device wait. The caller must not record such an event again until the ticket is done.
"""


def checked_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Return the fences as a tuple.

    Raises ConfigError for a fence that cannot be waited for, for an event that was never recorded, and for an
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


def pass_fence(fence: Fence, check_abandoned: Callable[[], object] = lambda: None) -> None:
    """Block until the work that `fence` stands for is over.

    `check_abandoned` may raise to end the wait. It is called between two calls of `query`, so it cannot end a
    wait of another kind.
    """
    how, wait = _wait_method(fence)
    if how != "query":
        wait()
        return
    while not _query_answer(wait()):
        check_abandoned()
        time.sleep(_POLL_S)


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
    if event is not None:
        return
    how, wait = _wait_method(fence)
    if isinstance(fence, type) or not how or inspect.iscoroutinefunction(wait):
        raise ConfigError(
            f"a given fence is {_described(fence)}, which a thread cannot wait for; pass a recorded event, a"
            " function that returns when the work is over, or an object with `synchronize`, `query` or"
            " `wait`"
        )


def _wait_method(fence: Fence) -> tuple[str, Callable[[], Any]]:
    """Return the name of the first way to wait for a fence, and its call; an empty name if there is none."""
    if callable(fence):
        return "call", fence
    for how in ("synchronize", "query", "wait"):
        if callable(wait := getattr(fence, how, None)):
            return how, wait
    return "", lambda: None


def _query_answer(answer: object) -> bool:
    # CUDA itself answers with an error code, in which 0 means done. Such an answer must not count as False.
    if not isinstance(answer, bool | np.bool_):
        raise TypeError(f"the query of a fence returned {answer!r}; it must say True or False")
    return bool(answer)


def _described(fence: object) -> str:
    return f"the class {fence.__name__}" if isinstance(fence, type) else f"of type {type(fence).__name__}"
