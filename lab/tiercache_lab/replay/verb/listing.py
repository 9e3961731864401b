"""Sources that can be replayed, as the help and `--list` show them.

Functions import the generators when they need them, because the import of numpy would slow every command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.text import Text
from typer.core import TyperCommand

from tiercache.cli.terminal import console, table

_PATH: Final = "DIR"
"""Name under which recorded sessions are listed, which are opened by path."""


class ReplayCommand(TyperCommand):
    """Typer command whose help ends with the names of all sources, policies, profiles and machines."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the sources, policies, profiles and machines."""
        super().format_help(ctx, formatter)
        from tiercache.policy import PROFILES
        from tiercache_lab.replay.machines import MACHINES
        from tiercache_lab.replay.sources import SESSIONS, SOURCES

        trace = (
            "a Mooncake trace: one JSON object per line and request, with timestamp, input_length,"
            " output_length and hash_ids"
        )
        with formatter.section("Sources"):
            formatter.write_dl(
                [
                    *((name, kind.summary) for name, kind in SOURCES.items()),
                    ("FILE", trace),
                    (_PATH, SESSIONS.summary),
                ]
            )
        with formatter.section("Policies"):
            formatter.write_text(policies())
        for title, names in {"Profiles": PROFILES, "Machines": MACHINES}.items():
            with formatter.section(title):
                formatter.write_text(", ".join(names))


def policies() -> str:
    """Return the names of all policies: those that `all` stands for, and the others."""
    from tiercache.policy import POLICIES
    from tiercache_lab.policies import RIVALS, VARIANTS

    return f"all: {', '.join(POLICIES)}. By name only: {', '.join((*RIVALS, *VARIANTS))}."


def show_sources() -> None:
    """Print the generators and recorded sessions with their parameters as a table, and names of policies."""
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
    to.print(f"Policies: {policies()}", style="dim")


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
