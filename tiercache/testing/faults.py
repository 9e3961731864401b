"""Disk faults on demand: `FaultEnv` is an `Env` whose calls fail by rules.

    env = FaultEnv(seed=1)
    env.fail("pwritev", at=3, error=errno.ENOSPC)       the third write from now on fails
    hang = env.hang("preadv")                           the next read waits ...
    hang.release()                                      ... until now
    env.tear("pwritev"); env.flip("preadv", at=2)

Rules count calls from the moment they are made. `calls` counts every call, so that a campaign can first run a scenario without faults
and then fail each call in turn.
"""

from __future__ import annotations

import errno as errors
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from typing import Any, Final, TypeAlias

from tiercache.storage.env import Env
from tiercache.storage.vectors import take, total

CALLS: Final = (
    "open", "close", "preadv", "pwritev", "fdatasync", "fsync", "forget", "cached", "fallocate", "ftruncate", "unlink", "rename", "mkdir",
    "chmod", "listdir", "lstat", "fstat", "statvfs", "try_lock", "try_share", "unlock", "commit", "run",
)  # fmt: skip
"""Names of the calls that rules can apply to: everything that touches the disk."""

HANG_SECONDS: Final = 60.0
"""Seconds after which a hang that was not released fails with ETIMEDOUT, so that a broken test does not hang as well."""

Call: TypeAlias = Callable[..., Any]
Effect: TypeAlias = Callable[[Call, tuple[Any, ...]], Any]
"""Replacement for a call: it gets the real call and its arguments, and returns or raises in its place."""


@dataclass(slots=True)
class Rule:
    """A rule that gives the calls `at` to `at + times - 1` of `call`, counted from its creation, an `effect` instead.

    `seen` counts the calls, and `fired` those for which the rule was due; of several due rules only the first takes effect.

    Thread safety: guarded by its FaultEnv.
    """

    call: str
    effect: Effect
    at: int = 1
    times: int = 1
    seen: int = 0
    fired: int = 0

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
    """An effect that makes calls wait; `reached` is set when the first of them begins to wait.

    Thread safety: any thread may wait for `reached` and call `release`.
    """

    reached: Event = field(default_factory=Event)
    _released: Event = field(default_factory=Event)

    def release(self) -> None:
        """Let the waiting calls go on, and every later call of this hang."""
        self._released.set()

    def __call__(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Wait for the release, then make the call; raise OSError(ETIMEDOUT) after `HANG_SECONDS`."""
        self.reached.set()
        if not self._released.wait(HANG_SECONDS):
            raise OSError(errors.ETIMEDOUT, "nobody released this hang")
        return call(*arguments)


class FaultEnv(Env):
    """An Env that makes real calls, except where a rule applies. The seed decides where a write tears and which bit flips.

    With the same seed and the same order of calls these are the same in every run.

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
        """Raise OSError(`error`) without making the call. A failed close still closes the descriptor, as on Linux."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            if call == "close":
                real(*arguments)
            raise OSError(error, os.strerror(error))

        return self.add(call, effect, at=at, times=times)

    def hang(self, call: str, *, at: int = 1, times: int = 1) -> Hang:
        """Delay the call until the hang is released."""
        hang = Hang()
        self.add(call, hang, at=at, times=times)
        return hang

    def delay(self, call: str, seconds: float, *, at: int = 1, times: int = 1) -> Rule:
        """Delay the call by `seconds`."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            time.sleep(seconds)
            return real(*arguments)

        return self.add(call, effect, at=at, times=times)

    def tear(self, call: str = "pwritev", *, at: int = 1, times: int = 1) -> Rule:
        """Write only a prefix, its length chosen by the seed, and report a whole write, as a power cut leaves acknowledged data."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            fd, buffers, *place = arguments
            size = total(buffers)
            part = take(buffers, 0, self._pick(size))
            if part:
                real(fd, part, *place)
            return size

        return self.add(call, effect, at=at, times=times)

    def shorten(self, call: str, *, at: int = 1, times: int = 1) -> Rule:
        """Read or write fewer bytes than asked, but at least one, and report that number, as the kernel may always do."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            fd, buffers, *place = arguments
            return real(fd, take(buffers, 0, max(1, self._pick(total(buffers)))), *place)

        return self.add(call, effect, at=at, times=times)

    def flip(self, call: str = "preadv", *, at: int = 1, times: int = 1) -> Rule:
        """Flip one bit, chosen by the seed, of what is read or written; a write leaves the caller's own buffers unchanged."""

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
        """Flip the first bit of every buffer that is read, so that no object that begins in one of the buffers is right."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            done = real(*arguments)
            for buffer in arguments[1]:
                if buffer.nbytes:
                    buffer[0] ^= 1
            return done

        return self.add("preadv", effect, at=at, times=times)

    def clear(self) -> None:
        """Forget all rules and counts."""
        with self._mutex:
            self.rules.clear()
            self.calls.clear()

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Make one call under the rules. Every rule counts it; the first one that is due decides."""
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
    real = getattr(Env, name)

    def call(self: FaultEnv, *arguments: Any) -> Any:
        return self.perform(name, partial(real, self), arguments)

    call.__name__ = name
    call.__doc__ = real.__doc__
    return call


for _name in CALLS:
    setattr(FaultEnv, _name, _ruled(_name))
