"""The contract, over every policy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policy.conformance import PolicyConformance
from tiercache.policy import POLICIES, Policy, policy_named
from tiercache_lab.policies import MAIN, RIVALS

for _name in (*MAIN, *RIVALS, "seglen:additive"):

    def _make(self: PolicyConformance, name: str = _name) -> Policy:
        return policy_named(name)

    _attributes: dict[str, Any] = {"make": _make}
    if _name not in POLICIES:
        _attributes["pytestmark"] = pytest.mark.slow
    globals()[f"Test{_name.title().translate(str.maketrans('', '', ':.'))}"] = type(
        _name, (PolicyConformance,), _attributes
    )
