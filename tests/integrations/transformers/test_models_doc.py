"""docs/models.md is in step with the installed transformers, as far as no model has to run."""

from __future__ import annotations

import re

from tests.integrations.transformers.sweep import TYPES, Row, documented, half


def test_every_type_that_transformers_maps_has_a_line() -> None:
    assert sorted(documented()) == TYPES
    assert sorted(parameter.values[0] for part in range(2) for parameter in half(part)) == TYPES


def test_every_line_says_what_became_of_its_type() -> None:
    for model_type, line in documented().items():
        assert re.fullmatch(
            rf"\| {re.escape(model_type)} \| (by chunk|by token|refused|not built) \| .*\|", line
        ), line
        served, reason = (part.strip() for part in line.strip("|").split(" | ", 2)[1:])
        assert reason or served.startswith("by"), "what is not served has a reason"


def test_a_line_stays_one_line() -> None:
    row = Row("a", "", "two\nlines | and a bar")
    assert row.line == "| a | refused | two lines \\| and a bar |"
