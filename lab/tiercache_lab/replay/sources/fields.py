"""Checked fields of JSON objects in trace files.

Every function raises InputError with a sentence that does not name the file; the reader of the file adds its
name and the place in it.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from tiercache.errors import InputError
from tiercache.text import shown

_MAX_NUMBER: Final = 10**15
"""Maximum of a number that may have a fraction."""


def parse_object(text: bytes, says: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON object that `text` holds, which must have all fields of `names`.

    `says` ends the message for a text that is no JSON; it describes what the file should hold.
    """
    try:
        row = json.loads(text.decode(), parse_constant=_constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {shown(text[:40].decode(errors='replace'))}; {says}") from error
    return check_object(row, names)


def check_object(row: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return `row`, which must be a JSON object with all fields of `names`."""
    wanted = f"{', '.join(names[:-1])} and {names[-1]}"
    if not isinstance(row, dict):
        refuse(f"{shown(row)} is not a JSON object with {wanted}")
    missing = [name for name in names if name not in row]
    if missing:
        refuse(f"no {' and no '.join(missing)}; give {wanted}")
    return row


def whole(row: dict[str, Any], name: str, low: int, high: int) -> int:
    """Return the field `name`, which must be an integer from `low` to `high`."""
    value = row[name]
    # `type(value) is int` excludes bool, a subclass of int.
    if type(value) is not int or not low <= value <= high:
        refuse(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def duration(row: dict[str, Any], name: str, unit: str) -> int | float:
    """Return the field `name`, which must be a number of `unit` that is not negative."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
        refuse(f"{name} must be a number of {unit} from 0 to 1e15, not {shown(value)}")
    return value


def block_ids(row: dict[str, Any], name: str, bits: int) -> list[int]:
    """Return the field `name`, which must be a list of integers from 0 to 2**bits - 1."""
    ids = row[name]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**bits for i in ids):
        refuse(f"{name} must be a list of integers from 0 to 2**{bits} - 1, not {shown(ids)}")
    return ids


def refuse(message: str) -> NoReturn:
    """Raise InputError with this message."""
    raise InputError(message)


def _constant(text: str) -> NoReturn:
    refuse(f"{text} is not a number in JSON")
