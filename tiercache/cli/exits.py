"""Exit codes: one table for all verbs, and the code that each kind of error ends in."""

from __future__ import annotations

import enum
from typing import Final

from tiercache.errors import InputError, RefusedError, StorageError, TierCacheError


class Exit(enum.IntEnum):
    """Exit codes of all verbs. A code means the same for every verb."""

    DONE = 0
    FAILED = 1
    MISUSED = 2
    UNREACHABLE = 3
    CORRUPT = 4
    REFUSED = 5
    NO = 6
    UNKNOWN = 7
    INTERRUPTED = 130
    UNREAD = 141
    TERMINATED = 143


MEANINGS: Final = {
    Exit.DONE: "done, and all is well",
    Exit.FAILED: "failed: a store, a disk or a process did not do what was asked",
    Exit.MISUSED: "used wrongly: an option, a setting or a file cannot be",
    Exit.UNREACHABLE: "nobody answers: no daemon, or no server",
    Exit.CORRUPT: "wrong bytes: something is not what was stored",
    Exit.REFUSED: "refused: the server answers, and does not allow it",
    Exit.NO: "no: a check failed, nothing came back, or you said no",
    Exit.UNKNOWN: "cannot be told",
    Exit.INTERRUPTED: "ended by Ctrl-C",
    Exit.UNREAD: "nobody reads the output any more",
    Exit.TERMINATED: "ended by SIGTERM",
}


class UnreachableError(StorageError):
    """A daemon or a server does not answer."""


class CannotTellError(TierCacheError):
    """An answer came, but it does not say what was asked."""


def code_of(error: Exception) -> Exit | None:
    """Return the exit code for an error caused by the user or the environment; None for a defect of tiercache."""
    if isinstance(error, UnreachableError):
        return Exit.UNREACHABLE
    if isinstance(error, CannotTellError):
        return Exit.UNKNOWN
    if isinstance(error, RefusedError):
        return Exit.REFUSED
    if isinstance(error, InputError):
        return Exit.MISUSED
    return Exit.FAILED if isinstance(error, TierCacheError | OSError) else None


def table() -> str:
    """Return all exit codes and their meanings, one per line."""
    return "\n".join(f"{code:>3}  {meaning}" for code, meaning in MEANINGS.items())


def line() -> str:
    """Return one sentence with the codes that a verb itself chooses, which are those below Exit.INTERRUPTED."""
    words = [f"{code} {meaning.partition(':')[0].partition(',')[0]}" for code, meaning in MEANINGS.items() if code < Exit.INTERRUPTED]
    return f"Exit codes: {', '.join(words)}; tiercache --help says more."
