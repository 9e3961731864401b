"""Entry points, by which other packages add stores, policies and verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group, sorted by name; of equal names the first on Python's path."""
    from importlib.metadata import entry_points  # takes longer than --version may

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def load(entry: EntryPoint, what: str) -> Any:
    """Import an entry point; raises ConfigError, in a sentence about `what`, if that fails."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs a package that is not installed ({error}); install it") from error
    except (Exception, SystemExit) as error:  # it is installed, but broken or of another version
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{what} cannot be imported: {reason}; install that package again") from error
