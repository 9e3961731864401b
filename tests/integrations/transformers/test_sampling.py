"""How the tokens of an answer are chosen: `Sampling`, and its `Chooser`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiercache.errors import InputError
from tiercache.integrations.transformers import Sampling
from tiercache.integrations.transformers.requests.request import Chooser


@pytest.mark.parametrize(
    "values",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"temperature": "1"}, {"temperature": True}, {"temperature": 10**400}, {"temperature": torch.ones(2)},
     {"seed": -1}, {"seed": 1 << 63}, {"seed": 0.5}, {"seed": None}],
    ids=lambda values: str(values)[:30],
)  # fmt: skip
def test_an_impossible_sampling_is_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(InputError, match=f"^{name} is .*; give"):
        Sampling(**values)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Draws of four tokens, one of them impossible, at three temperatures."""
    logits = torch.tensor([1.0, -float("inf"), 0.0, 2.0])
    for temperature in (0.5, 1.0, 4.0):
        choose = Chooser(Sampling(temperature, seed=3))
        counts = np.bincount([choose(logits) for _ in range(4_000)], minlength=4) / 4_000
        expected = torch.softmax(logits.double() / temperature, 0).numpy()
        assert counts[1] == 0
        assert np.abs(counts - expected).max() < 4 * np.sqrt(0.25 / 4_000)


def test_a_seed_gives_its_tokens_at_any_time_and_temperature() -> None:
    logits = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    for temperature in (1e-300, 0.7, 1e300):
        twice = [[choose(row) for row in logits] for choose in map(Chooser, [Sampling(temperature, 5)] * 2)]
        assert twice[0] == twice[1]
    assert [Chooser(Sampling(1e-300, 5))(row) for row in logits] == logits.argmax(1).tolist()
    far_apart = [
        tuple(map(Chooser(Sampling(1.0, seed)), logits)) for seed in (5, 5 + (1 << 32), 5 + (1 << 62))
    ]
    assert len(set(far_apart)) == 3, "every bit of a seed counts"
