"""Conformance suite for integrations: what tiercache promises inside an engine, asked of its real servers.

    class TestMyEngine(HostConformance):
        @pytest.fixture(scope="class")
        def hosts(self, tmp_path_factory): return MyHosts(...)     # a subclass of `Hosts`

    promise                               how it is seen
    no wrong byte                         answers and probabilities are those of a server without a cache
    all or nothing                        hits are whole pages; of a hybrid, such that have a state
    nothing is lost                       all whole pages come back: flushed, restarted, after `kill -9`
    damage, outage and hang are misses    the same answers, fewer hits; hits again afterwards
    bounded                               a full store stays within its capacity, and still serves
    tenants share nothing                 what one has stored is no hit of another

Greedy answers of a model tell a wrong byte only if they depend on all of the prompt: make its random weights
strong. In float32 a cached prefix changes no probability by rounding.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import pytest

LENGTHS: Final = (300, 1000, 1500, 700)
"""Tokens of the prompts: no whole pages of 16 or 64, of which a hybrid has to compute the last token."""
SMALLEST: Final = 3
"""Tokens of prompts are between this and `LARGEST`."""
LARGEST: Final = 250
_draw = random.Random(5)


def prompt(length: int) -> list[int]:
    """Return a prompt that begins like no other."""
    return [_draw.randrange(SMALLEST, LARGEST) for _ in range(length)]


PROMPTS: Final = [prompt(length) for length in LENGTHS]


class Answer(NamedTuple):
    """Answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    """Logarithm of the probability of each token."""
    cached: int
    """Number of the prompt's tokens that were not computed, as the server counts them."""


class Host(ABC):
    """Running server of a model; leaving its `with` block ends it as an operator does."""

    @abstractmethod
    def ask(self, prompt: Iterable[int], new: int = 8) -> Answer:
        """Return the greedy answer of `new` tokens to a prompt of token numbers."""

    @abstractmethod
    def flush(self) -> None:
        """Empty the engine's caches on device and host once everything is stored."""

    @abstractmethod
    def kill(self) -> object:
        """End all processes of the server at once."""


class Node(ABC):
    """Daemon of tiercache that serves within a `with` block."""

    url: str
    """Address, with deadlines of a few seconds."""

    @abstractmethod
    def start(self) -> None:
        """Serve again after `kill`."""

    @abstractmethod
    def kill(self) -> None:
        """End the daemon at once."""

    @abstractmethod
    def hang(self) -> None:
        """Let it answer nothing."""

    @abstractmethod
    def go_on(self) -> None:
        """Let it answer again."""


Running: TypeAlias = AbstractContextManager[Host]


class Hosts(ABC):
    """Servers of one engine.

    Thread safety: one thread.
    """

    page: int
    """Tokens of a page; states are as far apart."""
    kinds: Sequence[str] = ("attention", "hybrid")
    """Kinds of models that the engine's integration serves, the most demanding last."""

    def __init__(self) -> None:
        self._right: dict[str, list[Answer]] = {}

    @abstractmethod
    def start(self, kind: str, storage: str | None, tenant: str = "") -> Running:
        """Return a server of a model of this kind over a store, or without any cache."""

    @abstractmethod
    def node(self, directory: Path) -> AbstractContextManager[Node]:
        """Return a daemon that stores in a directory."""

    def right(self, kind: str) -> list[Answer]:
        """Return the answers of a server without a cache to all prompts."""
        if kind not in self._right:
            with self.start(kind, None) as host:
                self._right[kind] = ask_all(host)
            assert not any(cached(self._right[kind]))
        return self._right[kind]

    @property
    def whole(self) -> list[int]:
        """Number of tokens of each prompt that can be hit: all whole pages before the last token."""
        return whole_pages(self.page)


def whole_pages(page: int) -> list[int]:
    """Return how many tokens of each prompt a cache can have: all whole pages before the last token."""
    return [(length - 1) // page * page for length in LENGTHS]


def ask_all(host: Host) -> list[Answer]:
    """Return the answers to all prompts, one after the other."""
    return [host.ask(asked) for asked in PROMPTS]


def cached(answers: Iterable[Answer]) -> list[int]:
    """Return the number of cached tokens of each answer."""
    return [answer.cached for answer in answers]


def check(found: Sequence[Answer], expected: Sequence[Answer], *, when: str) -> None:
    """Compare answers with those of a server without a cache: equal tokens, probabilities up to rounding."""
    for n, (answer, right) in enumerate(zip(found, expected, strict=True)):
        where = f"{when}, prompt {n} ({answer.cached} of {LENGTHS[n]} tokens cached)"
        assert answer.tokens == right.tokens, f"{where}: another answer"
        apart = max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True))
        assert apart < 1e-3, f"{where}: log probabilities differ by {apart:g}"


def damage(store: Path, every: int) -> None:
    """Change a byte of the slabs of a `file` store at every so many bytes."""
    for slab in (store / "slabs").iterdir():
        with slab.open("r+b") as file:
            for place in range(100, slab.stat().st_size, every):
                os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 1]), place)


class HostConformance:
    """Conformance tests of an integration, as a base class for a test class with the fixture `hosts`.

    Thread safety: pytest makes one instance per test.
    """

    @pytest.mark.parametrize("kind", ["attention", "hybrid"])
    @pytest.mark.parametrize("medium", ["file", "grpc"])
    def test_every_way_back(self, kind: str, medium: str, hosts: Hosts, tmp_path: Path) -> None:
        """First, from the engine's memory, from the store, after a restart, and after a kill."""
        self._serves(hosts, kind)
        with ExitStack() as stack:
            url = f"file://{tmp_path}/store?capacity=256MiB"
            if medium == "grpc":
                url = stack.enter_context(hosts.node(tmp_path / "node")).url
            self.come_back(hosts, kind, url)

    @staticmethod
    def come_back(hosts: Hosts, kind: str, url: str) -> None:
        """Check answers and hits over a store in all ways."""
        right, start = hosts.right(kind), partial(hosts.start, kind, url)

        def asked(host: Host, when: str, hits: list[int]) -> None:
            found = ask_all(host)
            check(found, right, when=when)
            assert cached(found) == hits, when

        with start() as host:
            asked(host, "first", [0] * len(PROMPTS))
            asked(host, "again", hosts.whole)
            host.flush()
            asked(host, "flushed", hosts.whole)
        with start() as host:
            asked(host, "restarted", hosts.whole)
            host.kill()
        with start() as host:
            asked(host, "killed", hosts.whole)

    @staticmethod
    def _serves(hosts: Hosts, kind: str) -> None:
        if kind not in hosts.kinds:
            pytest.skip(f"this integration serves no model of the kind {kind}")

    def test_a_daemon_that_hangs_or_is_killed_costs_hits_and_no_answer(
        self, hosts: Hosts, tmp_path: Path
    ) -> None:
        """Each request goes on when the deadlines of the daemon's address have passed."""
        kind = hosts.kinds[-1]
        right = hosts.right(kind)
        with hosts.node(tmp_path / "node") as node, hosts.start(kind, node.url) as host:
            check(ask_all(host), right, when="first")
            node.hang()
            host.flush()
            hung = ask_all(host)
            check(hung, right, when="the daemon hangs")
            assert cached(hung) == [0] * len(PROMPTS)
            node.go_on()
            node.kill()
            host.flush()
            check(ask_all(host), right, when="the daemon is gone")
            node.start()
            host.flush()
            check(ask_all(host), right, when="the daemon is back")

    def test_a_store_that_lies_costs_hits_and_no_answer(self, hosts: Hosts, tmp_path: Path) -> None:
        """A byte of each 64 KiB is another one."""
        kind, store = hosts.kinds[-1], tmp_path / "store"
        right = hosts.right(kind)
        with hosts.start(kind, f"file://{store}?capacity=256MiB") as host:
            check(ask_all(host), right, when="first")
            host.flush()
            damage(store, 1 << 16)
            damaged = ask_all(host)
            check(damaged, right, when="damaged")
            assert sum(cached(damaged)) < sum(hosts.whole)
            check(ask_all(host), right, when="again")

    @pytest.mark.parametrize("kind", ["attention", "hybrid"])
    def test_two_servers_on_one_daemon(self, kind: str, hosts: Hosts, tmp_path: Path) -> None:
        """Each has computed a half of the prompts, and hits all; one of another tenant hits none."""
        self._serves(hosts, kind)
        right = hosts.right(kind)
        with hosts.node(tmp_path / "node") as node:
            with hosts.start(kind, node.url) as one, hosts.start(kind, node.url) as two:
                check([one.ask(asked) for asked in PROMPTS[:2]], right[:2], when="one")
                check([two.ask(asked) for asked in PROMPTS[2:]], right[2:], when="two")
                for host in (one, two):
                    host.flush()
                for host in (one, two):
                    found = ask_all(host)
                    check(found, right, when="both")
                    assert cached(found) == hosts.whole
            with hosts.start(kind, node.url, tenant="other") as host:
                found = ask_all(host)
                check(found, right, when="another tenant")
                assert cached(found) == [0] * len(PROMPTS)

    def test_a_full_store(self, hosts: Hosts, tmp_path: Path) -> None:
        """The store holds a part of the prompts: nothing grows beyond it, and what comes back is right."""
        store, capacity = tmp_path / "store", 4 << 20
        prompts = [prompt(1000) for _ in range(14)]
        whole = 999 // hosts.page * hosts.page * len(prompts)
        with hosts.start(hosts.kinds[-1], f"file://{store}?capacity={capacity}") as host:
            first = [host.ask(asked) for asked in prompts]
            assert cached(first) == [0] * len(prompts)
            host.flush()
            restored = 0
            for asked, answer in zip(prompts[::-1], first[::-1], strict=True):
                again = host.ask(asked)
                assert again.tokens == answer.tokens
                restored += again.cached
            assert 0 < restored < whole
        held = sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file())
        assert held <= capacity
