"""Disk faults on demand: `FaultEnv` is an `Env` whose calls fail by rules.

    env = FaultEnv(seed=1)
    env.fail("pwritev", at=3, error=errno.ENOSPC)       the third write from now on fails
    hang = env.hang("preadv")                           the next read waits ...
    hang.release()                                      ... until now
    env.tear("pwritev"); env.flip("preadv", at=2)

A rule counts calls from the moment at which the rule is made. `FaultEnv.calls` counts every call. A test can
therefore run a scenario without faults first, and then let each of its calls fail in turn.
"""

from __future__ import annotations

import errno as errors
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from typing import Any, Final, TypeAlias

from tiercache.storage.env import Env
from tiercache.storage.vectors import take, total

CALLS: Final = (
    "open", "close", "preadv", "pwritev", "fdatasync", "fsync", "cached", "fallocate", "ftruncate",
    "unlink", "rename", "mkdir", "realpath",
    "chmod", "listdir", "lstat", "fstat", "statvfs", "try_lock", "try_share", "unlock", "commit", "run",
)  # fmt: skip
"""Names of the calls that rules can apply to: everything that touches the disk."""

HANG_SECONDS: Final = 60.0
"""Seconds after which a hang fails with ETIMEDOUT, so that no test waits for ever."""

Call: TypeAlias = Callable[..., Any]
Effect: TypeAlias = Callable[[Call, tuple[Any, ...]], Any]
"""Function that is called in place of a call. It gets the real call and the arguments.

What the function returns or raises is the result of the call.
"""


@dataclass(slots=True)
class Rule:
    """Rule that replaces some calls of `call` by `effect`.

    If several rules apply to a call, only the first rule takes effect.

        call       1   2   3   4   5   6     counted from the creation of the rule
        applies        x   x   x             at=2, times=3

    Thread safety: guarded by its FaultEnv.
    """

    call: str
    effect: Effect
    at: int = 1
    """Number of the first call to which the rule applies, from 1."""
    times: int = 1
    """Number of calls to which the rule applies, one after another."""
    seen: int = 0
    """Number of calls since the creation of the rule."""
    fired: int = 0
    """Number of calls to which the rule has applied."""

    def due(self, call: str) -> bool:
        """Count one call, and return whether this rule applies to it."""
        if call != self.call:
            return False
        self.seen += 1
        hit = self.at <= self.seen < self.at + self.times
        self.fired += hit
        return hit


@dataclass(slots=True)
class Hang:
    """An effect that makes calls wait, on any thread; `reached` is set when the first begins to wait."""

    reached: Event = field(default_factory=Event)
    _released: Event = field(default_factory=Event)

    def release(self) -> None:
        """Let the waiting calls continue, and let later calls pass without waiting."""
        self._released.set()

    def __call__(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Wait for the release, then make the call; raise OSError (ETIMEDOUT) after `HANG_SECONDS`."""
        self.reached.set()
        if not self._released.wait(HANG_SECONDS):
            raise OSError(errors.ETIMEDOUT, "this hang was not released in time")
        return call(*arguments)


class FaultEnv(Env):
    """An Env that makes real calls, except where a rule applies.

    The seed decides where a write tears and which bit flips. With the same seed and the same order of calls,
    every run has the same faults.

    Thread safety: any thread may call or make rules; calls are counted in the order in which they arrive.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self.rules: list[Rule] = []
        self._random = random.Random(seed)
        self._mutex = Lock()

    def add(self, call: str, effect: Effect, *, at: int = 1, times: int = 1) -> Rule:
        """Make a rule with a custom effect; raise ValueError for a name that is not in `CALLS`."""
        if call not in CALLS:
            raise ValueError(f"{call!r} is not a call that can fail; use one of {', '.join(CALLS)}")
        rule = Rule(call, effect, at, times)
        with self._mutex:
            self.rules.append(rule)
        return rule

    def fail(self, call: str, *, at: int = 1, times: int = 1, error: int = errors.EIO) -> Rule:
        """Make a rule that raises OSError(`error`) instead of a call; a failed close still closes."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            if call == "close":
                real(*arguments)
            raise OSError(error, os.strerror(error))

        return self.add(call, effect, at=at, times=times)

    def hang(self, call: str, *, at: int = 1, times: int = 1) -> Hang:
        """Make a rule that delays the call until the hang is released."""
        hang = Hang()
        self.add(call, hang, at=at, times=times)
        return hang

    def tear(self, call: str = "pwritev", *, at: int = 1, times: int = 1) -> Rule:
        """Make a rule that writes only the first bytes, but reports a complete write.

        The seed chooses how many bytes. A power cut can leave acknowledged data like this.
        """

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            fd, buffers, *place = arguments
            size = total(buffers)
            part = take(buffers, 0, self._pick(size))
            if part:
                real(fd, part, *place)
            return size

        return self.add(call, effect, at=at, times=times)

    def shorten(self, call: str, *, at: int = 1, times: int = 1) -> Rule:
        """Make a rule that moves fewer bytes than asked, at least one, and says so, as the kernel may."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            fd, buffers, *place = arguments
            return real(fd, take(buffers, 0, max(1, self._pick(total(buffers)))), *place)

        return self.add(call, effect, at=at, times=times)

    def flip(self, call: str = "preadv", *, at: int = 1, times: int = 1) -> Rule:
        """Make a rule that flips one bit of the bytes that are read or written; the seed chooses the bit.

        A write flips a bit of a copy, and leaves the caller's buffers unchanged.
        """

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            fd, buffers, *place = arguments
            if call == "preadv":
                done = real(fd, buffers, *place)
                self._flip(buffers, done)
                return done
            copy = memoryview(bytearray(b"".join(buffers)))
            self._flip([copy], copy.nbytes)
            return real(fd, [copy], *place)

        return self.add(call, effect, at=at, times=times)

    def spoil(self, *, at: int = 1, times: int = 1) -> Rule:
        """Make a rule that flips a bit in the first byte of every buffer that is read."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            done = real(*arguments)
            for buffer in arguments[1]:
                if buffer.nbytes:
                    buffer[0] ^= 1
            return done

        return self.add("preadv", effect, at=at, times=times)

    def clear(self) -> None:
        """Remove all rules, and set all counts to 0."""
        with self._mutex:
            self.rules.clear()
            self.calls.clear()

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Make one call under the rules. Every rule counts the call; the first rule that applies decides."""
        with self._mutex:
            self.calls[name] += 1
            due = [rule for rule in self.rules if rule.due(name)]
        return due[0].effect(call, arguments) if due else call(*arguments)

    def _pick(self, below: int) -> int:
        with self._mutex:
            return self._random.randrange(below) if below else 0

    def _flip(self, buffers: Sequence[memoryview], size: int) -> None:
        if size:
            where = self._pick(size)
            [view] = take(buffers, where, where + 1)
            view[0] ^= 1 << self._pick(8)


def _ruled(name: str) -> Call:
    """Return a method that makes the call `name` of `Env` under the rules."""
    real = getattr(Env, name)

    def call(self: FaultEnv, *arguments: Any) -> Any:
        return self.perform(name, partial(real, self), arguments)

    call.__name__ = name
    call.__doc__ = real.__doc__
    return call


for _name in CALLS:
    setattr(FaultEnv, _name, _ruled(_name))
