"""What has to be over before a copy may start, and how it is waited for."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from tiercache.errors import ConfigError

_LOOK_S: Final = 200e-6
"""Seconds between two looks at a fence that can only be asked."""


class Synchronizable(Protocol):
    """An event that a thread can wait for, such as `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Return when everything before the event is done."""


class Queryable(Protocol):
    """An event that can be asked."""

    def query(self) -> bool:
        """Is everything before the event done?"""


class Waitable(Protocol):
    """Something that a thread can wait for, such as `threading.Event`."""

    def wait(self) -> object:
        """Return when it has happened."""


Fence: TypeAlias = Callable[[], object] | Synchronizable | Queryable | Waitable
"""What has to be over before a copy may start. Of the ways that an object has, the first of these is taken: called, `synchronize`, `query`
until it says True, `wait`; all on a thread of the transfer engine, and if one raises, the ticket fails.

An engine for CUDA waits for a `torch.cuda.Event`, or anything else with a handle in `cuda_event`, on the device, without a thread. Who
passes one leaves it alone, that is, does not record it anew, until the ticket is done.
"""


def checked_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences; ConfigError for one that cannot be waited for or stands for nothing, and for what is no sequence of fences."""
    try:
        found = tuple(fences)
    except TypeError as error:
        raise ConfigError(f"`after` is a {type(fences).__name__}; give a sequence of fences, such as [event]") from error
    for fence in found:
        _check(fence)
    return found


def pass_fence(fence: Fence, go_on: Callable[[], object] = lambda: None) -> None:
    """Block until `fence` is over. `go_on` may raise to end the wait, where that can be ended."""
    how, wait = _way(fence)
    if how != "query":
        wait()
        return
    while not _said(wait()):
        go_on()
        time.sleep(_LOOK_S)


def event_of(fence: Fence) -> int | None:
    """The handle of an event of CUDA, 0 for one that was never recorded; None for any other fence."""
    handle = getattr(fence, "cuda_event", None)
    try:
        return None if isinstance(handle, bool) else operator.index(handle)  # type: ignore[arg-type]  # None and others raise
    except TypeError:
        return None


def _check(fence: Fence) -> None:
    event = event_of(fence)
    if event == 0 or (event is None and getattr(fence, "event_id", None) == 0):  # it stands for nothing, and nobody would wait
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
    """How to wait for it, and the call for that; no name if there is none."""
    if callable(fence):
        return "call", fence
    for how in ("synchronize", "query", "wait"):
        if callable(wait := getattr(fence, how, None)):
            return how, wait
    return "", lambda: None


def _said(answer: object) -> bool:
    if not isinstance(answer, bool | np.bool_):  # CUDA's own answers are codes, of which 0 is yes
        raise TypeError(f"the query of a fence said {answer!r}; it must say True or False")
    return bool(answer)


def _described(fence: object) -> str:
    return f"the class {fence.__name__}" if isinstance(fence, type) else f"of type {type(fence).__name__}"
