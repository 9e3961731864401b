"""Integrations with inference engines: plug-ins for SGLang and vLLM, and a worker over transformers.

Principles:

1. A store that fails is a miss and a line in the log, never an exception in the engine's thread.
2. A fact that decides over bytes is read from the engine or required, never assumed.
3. What cannot be restored exactly is refused when the engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")


def attempt(call: Callable[[], T], otherwise: U, what: str) -> T | U:
    """Return what a call in an engine's thread returns; after a failure log it, and return `otherwise`."""
    try:
        return call()
    except Exception:  # noqa: BLE001  a bug, or a store that breaks its contract, may raise anything
        _log.exception("tiercache: %s failed", what)
        return otherwise
