"""The contract, over every policy."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tiercache.testing.policies")

from tiercache.policy import POLICIES, Policy, policy_named  # noqa: E402
from tiercache.testing.policies import PolicyConformance  # noqa: E402


for _name in (*POLICIES, "seglen:0.5", "marconi:0", "marconi:2"):

    def _make(self: PolicyConformance, name: str = _name) -> Policy:
        return policy_named(name)

    globals()[f"Test{_name.title()}"] = type(_name, (PolicyConformance,), {"make": _make})
