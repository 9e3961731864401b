"""A replay whose storage fails ends without figures, whichever call failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.replay.test_drive import CHATS, HYBRID, disk
from tiercache.core import Outcome
from tiercache.storage.base import GetItem, SetItem
from tiercache_lab.replay import cache
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.sources import open_source
from tiercache_lab.replay.store import NullStore

SMALL = Tiers(host_bytes=400_000, storage=disk(1_500_000))
TWO = replace(SMALL, storage=(*SMALL.storage, StorageTier("far", 3_000_000)))


class BrokenError(Exception):
    """Exception of a store that breaks."""


def breaking(operation: str, *, after: int = 3, once: bool = True) -> type[NullStore]:
    """A null store whose call `operation` raises after so many calls, once or from then on."""
    calls = 0

    def broken(self: NullStore, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after or (calls > after and not once):
            raise BrokenError(f"call {calls} of {operation}")
        return getattr(super(store, self), operation)(*arguments)

    store = type("Breaking", (NullStore,), {operation: broken})
    return store


def run(tiers: Tiers, write: str = "write_through") -> tuple[Run, list[int]]:
    """A run that is not begun, and the list that gets its steps."""
    source = open_source(CHATS, seed=1)
    return Run(source, measure(source), Setup("hvd", HYBRID, tiers, write=write)), []


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("tiers", [SMALL, TWO], ids=["one", "two"])
@pytest.mark.parametrize("operation", ["set", "get", "exists", "advise"])
def test_one_exception_of_a_store_ends_the_run_with_it(operation, tiers, write, monkeypatch):
    monkeypatch.setattr(cache, "NullStore", breaking(operation))
    one, steps = run(tiers, write)
    with pytest.raises(RuntimeError, match=r"the replay's storage raised in .*defect of tiercache") as raised:
        one.go(lambda: steps.append(1))
    assert isinstance(raised.value.__cause__, BrokenError)
    assert str(raised.value.__cause__) == f"call 3 of {operation}", "the first of several is told"
    assert len(steps) < 50, "the requests that are left are not served"


@pytest.mark.parametrize("operation", ["set", "get", "exists", "advise"])
def test_a_store_that_raises_from_now_on_ends_the_run_too(operation, monkeypatch):
    """Writes that wait for the end of an outage do not keep the run waiting."""
    monkeypatch.setattr(cache, "NullStore", breaking(operation, once=False))
    one, _ = run(SMALL)
    with pytest.raises(RuntimeError) as raised:
        one.go()
    assert str(raised.value.__cause__) == f"call 3 of {operation}"


@pytest.mark.parametrize("operation", ["set", "get"])
def test_a_store_that_answers_with_an_error_ends_the_run(operation, monkeypatch):
    class Refusing(NullStore):
        """Null store whose first set or get fails without an exception."""

        failed = 0

        def set(self, items: Sequence[SetItem]) -> list[Outcome]:
            return self.answer("set", super().set(items))

        def get(self, items: Sequence[GetItem]) -> list[Outcome]:
            return self.answer("get", super().get(items))

        def answer(self, name: str, outcomes: list[Outcome]) -> list[Outcome]:
            if name == operation and not self.failed:
                self.failed = len(outcomes)
                return [Outcome.ERROR] * self.failed
            return outcomes

    monkeypatch.setattr(cache, "NullStore", Refusing)
    one, steps = run(SMALL)
    with pytest.raises(RuntimeError, match=rf"storage failed \(storage_{operation}s_total kv error: \d+"):
        one.go(lambda: steps.append(1))
    assert len(steps) == 50
