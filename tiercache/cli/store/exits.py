"""Exit codes that say more than "it went wrong" (1) and "it was used wrongly" (2)."""

from __future__ import annotations

from typing import Final

EXIT_UNREACHABLE: Final = 3
"""The daemon does not answer, or says that it is unhealthy."""
EXIT_CORRUPT: Final = 4
"""Objects were found that are not what was stored."""
