"""Half of all model types of transformers: what `docs/models.md` says of each is so. See `sweep`."""

from __future__ import annotations

import pytest

from tests.integrations.transformers.sweep import documented, half, settled, tried


@pytest.mark.parametrize("model_type", half(0))
def test_a_type_is_served_exactly_or_refused_in_one_sentence(model_type: str) -> None:
    assert settled(tried(model_type).line) == settled(documented()[model_type])
