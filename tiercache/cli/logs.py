"""The log of the daemon on its standard error stream: lines for people, or JSON."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.stdlib import ExtraAdder, ProcessorFormatter
from structlog.typing import EventDict

from tiercache.daemon.call_log import CURRENT


def start_logging(level: str, style: str, stream: TextIO | None = None) -> None:
    """Write the lines of all loggers from `level` on, in the format `style` (`text` or `json`), to `stream`.

    A line that comes while a call is served names the call. A second call takes the place of the first.
    """
    stream = stream or sys.stderr
    renderer: Any
    if style == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        # 0: no padding behind the event; the parameter's name has changed between versions.
        renderer = structlog.dev.ConsoleRenderer(
            0, colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                ProcessorFormatter.remove_processors_meta,
                _add_call,
                structlog.processors.format_exc_info if style == "json" else _escape,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # gRPC for Python tells of each client that goes away as of an error.
    logging.getLogger("grpc").setLevel(max(logging.CRITICAL, root.level))


def _add_call(_: Any, __: str, line: EventDict) -> EventDict:
    call = CURRENT.get()
    return line if call is None else call.fields() | dict(line)


def _escape(_: Any, __: str, line: EventDict) -> EventDict:
    """Escape what a client may have put into a text to begin a line of its own, or to move the cursor."""
    for name, value in line.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            line[name] = value.encode("unicode_escape").decode()
    return line
