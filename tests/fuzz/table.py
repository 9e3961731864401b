"""All targets of fuzzing."""

from __future__ import annotations

from tests.fuzz.received import RECEIVED
from tests.fuzz.stored import STORED
from tests.fuzz.written import WRITTEN

TARGETS = {target.name: target for target in (*RECEIVED, *STORED, *WRITTEN)}
"""Every target by its name."""
