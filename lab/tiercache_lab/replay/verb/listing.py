"""Sources, policies, models and machines that can be replayed, as `--list` shows them.

Functions import the generators when they need them, because the import of numpy would slow every command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.text import Text

from tiercache.cli.terminal import console, table

_PATH: Final = "DIR"
"""Name under which recorded sessions are listed, which are opened by path."""


def show_sources() -> None:
    """Print the generators and recorded sessions with their parameters, and all other names."""
    from tiercache.policy import PROFILES
    from tiercache_lab.policies import MAIN, RIVALS, VARIANTS
    from tiercache_lab.replay.machines import MACHINES
    from tiercache_lab.replay.sources import SESSIONS, SOURCES

    shown = table(
        ("generator", "parameter", "default", "from", "to", "what it is"),
        left=("generator", "parameter", "what it is"),
    )
    for name, kind in (*SOURCES.items(), (_PATH, SESSIONS)):
        shown.add_section()
        shown.add_row(f"[bold]{name}", *[""] * 4, Text(kind.summary, style="italic"))
        for option in kind.options:
            shown.add_row(
                "",
                option.name,
                str(option.default),
                _bound(option.low),
                _bound(option.high),
                Text(option.about),
            )
    to = console()
    to.print(shown)
    to.print(
        "Write parameters after the name or the path: 'shared-prefix?groups=32&question=64-128'. A length is"
        " a number or a range.",
        style="dim",
    )
    others = ", ".join((*RIVALS, *VARIANTS))
    for title, names in {
        "Policies": f"all: {', '.join(MAIN)}. By name only: {others}",
        "Profiles": ", ".join(PROFILES),
        "Machines": ", ".join(MACHINES),
    }.items():
        to.print(f"{title}: {names}.", style="dim")


def source_records() -> Iterator[dict[str, Any]]:
    """Yield the generators and recorded sessions with their parameters as dictionaries for JSON."""
    from tiercache_lab.replay.sources import SESSIONS, SOURCES

    for name, kind in (*SOURCES.items(), (_PATH, SESSIONS)):
        parameters = [
            {
                "name": o.name,
                "default": str(o.default) if isinstance(o.default, tuple) else o.default,
                "low": o.low,
                "high": o.high,
            }
            | {"about": o.about}
            for o in kind.options
        ]
        row = {
            "name": name,
            "summary": kind.summary,
            "page_size": kind.page_size,
            "concurrency": kind.concurrency,
        }
        yield row | {"parameters": parameters}


def _bound(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
