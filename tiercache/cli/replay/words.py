"""Figures as a terminal shows them, and the terminal."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 120
"""Columns of what is not printed to a terminal."""


def terminal() -> Console:
    """Where tables go."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)


def percent(value: float | None) -> str:
    """A fraction, as 78.1 %."""
    from tiercache.replay.report import words

    return _plain(words.percent(value))


def size(value: float | None) -> str:
    """Bytes, as 12.3 GiB."""
    from tiercache.replay.report import words

    return _plain(words.size(value))


def milliseconds(value: float | None) -> str:
    """A time, as 1,420 ms."""
    from tiercache.replay.report import words

    return _plain(words.milliseconds(value))


def _plain(text: str) -> str:
    # Not every terminal has the narrow space that suits a page.
    return text.replace("\u202f", " ")
