"""The page at /status: one file with its style and its script, which shows status.json and asks again."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

PAGE: Final = files(__package__ or "").joinpath("status.html").read_bytes()
"""The page. It is the same for everyone: it has no figures of its own."""


def _hash_of(element: bytes) -> str:
    """Return the source expression that allows an inline element of the page, and nothing else."""
    [inside] = re.findall(rb"<%b>(.*?)</%b>" % (element, element), PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash_of(b'script')}",
        f"style-src {_hash_of(b'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy of the page."""
