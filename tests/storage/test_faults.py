"""Every call of every operation fails once, with every error; reads and writes come short, tear and flip; and
the power goes.

For each operation and each Env call that it makes, the n-th such call fails, for n = 1, 2, 3, ... until the
operation is over before the fault. So nothing is left out when a store makes another call tomorrow.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.clones import SMALL, clone
from tests.campaign.stores import KINDS, Subject, available, check_integrity, descriptors
from tests.examples import slow_after
from tests.faults import CALLS, FaultEnv, Rule
from tests.storage.operations import (
    OLD,
    OPERATIONS,
    Look,
    Operation,
    QuickEnv,
    do_close,
    do_flush,
    do_get,
    do_set,
    do_set_torn,
    nothing_more,
)
from tests.storage_backends.local.files import disk_bytes
from tiercache.errors import StorageError
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED
from tiercache.testing.objects import fetch, key, payload, put

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
VARIANTS = [(kind, durability) for kind in KINDS for durability in ("process", "power")]

Break = Callable[[FaultEnv, str, int], Rule]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Path]:
    """Stores to start from: closed in order, as a kill leaves them, and full."""
    found: dict[tuple[str, str, str], Path] = {}
    for kind, durability in VARIANTS:
        if kind not in available():
            continue
        base = tmp_path_factory.mktemp(f"{kind}-{durability}")
        with Subject(kind, base / "closed", SMALL, durability).open() as store:
            for name, data in OLD.items():
                assert put(store, key(name), data) is STORED
            shutil.copytree(base / "closed", base / "killed")
        shutil.copytree(base / "closed", base / "full")
        with Subject(kind, base / "full", SMALL, durability).open() as store:
            for n in range(60):
                assert put(store, key(("fill", n)), payload(("fill", n), 100_000)) is STORED
        for template in ("closed", "killed", "full"):
            found[kind, durability, template] = base / template
    return found


class Trials:
    """Runs one operation again and again from the same store, with a rule of the test's choice."""

    def __init__(self, subject: Subject, template: Path | None, operation: Operation) -> None:
        self.subject, self.template, self.operation = subject, template, operation
        self.env = QuickEnv()
        self.strict = True

    def exhaust(self, rule: Break, calls: Sequence[str] = CALLS) -> int:
        """Every call in turn. Returns how many faults came to bear."""
        self.run(lambda _: None)
        seen = set(self.env.calls)
        tried: set[str] = set()
        fired = 0
        while todo := sorted((seen & set(calls)) - tried):
            for name in todo:
                at = 1
                while self.run(lambda env, name=name, at=at: rule(env, name, at)):
                    seen |= set(self.env.calls)
                    at += 1
                tried.add(name)
                fired += at - 1
        return fired

    def run(self, arm: Callable[[FaultEnv], Rule | None]) -> bool:
        """One trial; True if its fault came to bear."""
        shutil.rmtree(self.subject.path, ignore_errors=True)
        if self.template is not None:
            shutil.copytree(self.template, self.subject.path)
        self.env = QuickEnv(seed=1)
        before = descriptors()
        fired = self._attempt(arm)
        calls = self.env.calls.copy()
        with self._settled() as store:
            self._look(store)
            self.look(store)
            if self.operation.act not in (None, do_close):
                self.operation.act(store)(store)
                self._look(store)
        assert descriptors() <= before, "no descriptor is left open"
        if self.operation.act is not None:
            with self._settled() as store:
                self._look(store)
        self.env.calls = calls
        return fired

    def _attempt(self, arm: Callable[[FaultEnv], Rule | None]) -> bool:
        """The operation under the fault, whatever it says; then the store is closed, or kept for a look."""
        self.store = self.subject.open(self.env) if self.operation.act else None
        self.env.clear()
        rule = arm(self.env)
        self.look: Look = nothing_more
        before = descriptors()
        try:
            if self.store is None:
                self.store = self.subject.open(self.env)
            else:
                assert self.operation.act is not None
                self.look = self.operation.act(self.store)
        except StorageError:
            assert self.operation.act in (None, do_flush), "only opening and flush may raise"
            assert self.operation.act or descriptors() <= before, "a failed opening leaves nothing open"
        self.env.rules.clear()
        if self.operation.act is do_flush and self.store is not None:
            self.store.close()  # after a flush that failed, none succeeds until the store is opened again
            self.store = None
        if self.operation.act is do_close:
            self.store = None
        return rule is not None and rule.fired > 0

    def _settled(self) -> StorageBackend:
        """The store as it is after the fault, or opened again where it is not open."""
        store, self.store = self.store, None
        return store or self.subject.open(QuickEnv())

    def _look(self, store: StorageBackend) -> None:
        """Nothing wrong is served, nothing is missing that need not be, the cap holds."""
        check_integrity(store)
        assert disk_bytes(self.subject.path) <= self.subject.capacity
        if self.template is None:
            assert put(store, key("first"), b"first") in (STORED, HIT)
            return
        found = {name: fetch(store, key(name), len(data)) for name, data in OLD.items()}
        right = [name for name, data in found.items() if data == OLD[name]]
        rest = {name: data for name, data in found.items() if name not in right}
        assert set(rest.values()) <= ({MISS, CORRUPT} if not self.strict else {MISS}), rest
        assert len(rest) <= self.operation.may_cost or not self.strict, f"{rest} were lost"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where there is one: a real sync says nothing here and takes the most time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


@pytest.fixture
def trials(
    templates: dict[tuple[str, str, str], Path], memory: Path, request: pytest.FixtureRequest
) -> Trials:
    variant, name = request.param
    kind, durability = variant
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    operation = OPERATIONS[name]
    return Trials(
        Subject(kind, memory / "s", SMALL, durability),
        templates.get((kind, durability, operation.template)),
        operation,
    )


def over(*names: str) -> pytest.MarkDecorator:
    """Each of these operations on each store."""
    # The other operations are the same for both durabilities.
    cases = [(v, name) for v in VARIANTS for name in names if v[1] == "process" or name in ("set", "flush")]
    return pytest.mark.parametrize(
        "trials", cases, ids=[f"{v[0]}-{v[1]}-{name}" for v, name in cases], indirect=True
    )


def failing(error: int) -> Break:
    """The call fails. A close fails as on Linux: the descriptor is gone all the same."""

    def closes(real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        real(*arguments)
        raise OSError(error, os.strerror(error))

    return lambda env, name, at: (
        env.add(name, closes, at=at) if name == "close" else env.fail(name, at=at, error=error)
    )


@over(*(name for name, operation in OPERATIONS.items() if operation.act))
@pytest.mark.parametrize("error", slow_after(1, ERRORS), ids=errno.errorcode.get)
def test_every_call_fails_once(trials: Trials, error: int) -> None:
    trials.exhaust(failing(error))


@over(*(name for name, operation in OPERATIONS.items() if not operation.act))
@pytest.mark.parametrize("error", slow_after(1, ERRORS), ids=errno.errorcode.get)
def test_every_call_of_an_opening_fails_once(trials: Trials, error: int) -> None:
    trials.exhaust(failing(error))


@over(*OPERATIONS)
def test_every_read_and_write_comes_short_once(trials: Trials) -> None:
    trials.operation = Operation(
        trials.operation.template,
        trials.operation.act,
        0 if trials.operation.act in (do_get, None) else 10**9,
    )
    trials.exhaust(lambda env, name, at: env.shorten(name, at=at), ("preadv", "pwritev"))


@over("set", "evict", "get", "open", "recover")
@pytest.mark.parametrize("how", ["tear", "flip"])
def test_what_tears_or_flips_is_never_served(trials: Trials, how: str) -> None:
    trials.strict = False
    act = trials.operation.act
    if act is do_set:
        trials.operation = Operation(trials.operation.template, do_set_torn, 10**9)
    trials.exhaust(
        lambda env, name, at: getattr(env, how)(name, at=at),
        ("pwritev",) if how == "tear" else ("pwritev", "preadv"),
    )


@pytest.mark.parametrize("seed", slow_after(4, range(12)))
@pytest.mark.parametrize(("kind", "durability"), VARIANTS)
def test_a_power_cut_takes_only_what_it_may(memory: Path, kind: str, durability: str, seed: int) -> None:
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    verdict = clone(Subject(kind, memory / "s", SMALL, durability), seed, memory / "left")
    assert (verdict.wrong, verdict.lost) == (0, 0), verdict.notes
