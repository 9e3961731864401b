"""The contract, over every policy."""

from __future__ import annotations

from tests.policy.conformance import PolicyConformance
from tiercache.policy import POLICIES, RIVALS, Policy, policy_named

for _name in (*POLICIES, *RIVALS, "seglen:additive", "marconi:artifact:0.3"):

    def _make(self: PolicyConformance, name: str = _name) -> Policy:
        return policy_named(name)

    globals()[f"Test{_name.title().translate(str.maketrans('', '', ':.'))}"] = type(
        _name, (PolicyConformance,), {"make": _make}
    )
