"""Sources that can be replayed, in the help and for `--list`. Generators are imported on demand, because they need numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from tiercache.cli.replay.words import terminal


class ReplayCommand(TyperCommand):
    """Typer command whose help ends with the sources, policies and profiles that its options can name."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the sources, policies and profiles."""
        super().format_help(ctx, formatter)
        from tiercache.policy import POLICIES, PROFILES
        from tiercache.replay.sources import SOURCES

        console = Console(emoji=False)
        names = Table.grid(padding=(0, 2, 0, 0))
        names.add_column(no_wrap=True, style="bold cyan")
        names.add_column()
        for name, kind in SOURCES.items():
            names.add_row(name, Text(kind.summary))
        names.add_row("FILE", "a Mooncake trace: a line of JSON per request, with timestamp, input_length, output_length and hash_ids")
        for title, content in (("Sources", names), ("Policies", ", ".join(POLICIES)), ("Profiles", ", ".join(PROFILES))):
            console.print(Panel(content, box=ROUNDED, title=title, title_align="left", border_style="dim"), highlight=False)


def show_sources() -> None:
    """Print the generators with their parameters as a table."""
    from tiercache.replay.sources import SOURCES

    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("generator", "parameter", "default", "from", "to", "what it is"):
        shown.add_column(column, justify="right" if column in ("default", "from", "to") else "left", no_wrap=column != "what it is")
    for name, kind in SOURCES.items():
        shown.add_section()
        shown.add_row(f"[bold]{name}", *[""] * 4, Text(kind.summary, style="italic"))
        for option in kind.options:
            shown.add_row("", option.name, str(option.default), _bound(option.low), _bound(option.high), Text(option.about))
    console = terminal()
    console.print(shown)
    console.print("Write them behind the name: 'shared-prefix?groups=32&question=64-128'. Lengths are a number or a range.", style="dim")


def source_records() -> Iterator[dict[str, Any]]:
    """Yield the generators with their parameters as dictionaries for JSON."""
    from tiercache.replay.sources import SOURCES

    for name, kind in SOURCES.items():
        parameters = [
            {"name": o.name, "default": str(o.default) if isinstance(o.default, tuple) else o.default, "low": o.low, "high": o.high}
            | {"about": o.about}
            for o in kind.options
        ]
        row = {"name": name, "summary": kind.summary, "page_size": kind.page_size, "concurrency": kind.concurrency}
        yield row | {"parameters": parameters}


def _bound(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
