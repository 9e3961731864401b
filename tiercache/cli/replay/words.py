"""Formatting of figures for a terminal, and the console for tables."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 120
"""Width, in columns, of output that is not printed to a terminal."""


def terminal() -> Console:
    """Return the console for tables on stdout."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)


def percent(value: float | None) -> str:
    """Format a fraction as a percentage, such as "78.1 %"."""
    from tiercache.replay.report import words

    return _plain(words.percent(value))


def size(value: float | None) -> str:
    """Format a number of bytes, such as "12.3 GiB"."""
    from tiercache.replay.report import words

    return _plain(words.size(value))


def milliseconds(value: float | None) -> str:
    """Format a time in milliseconds, such as "1,420 ms"."""
    from tiercache.replay.report import words

    return _plain(words.milliseconds(value))


def _plain(text: str) -> str:
    # Replace the narrow no-break space of the HTML report: not every terminal font has it.
    return text.replace("\u202f", " ")
