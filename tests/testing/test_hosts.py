"""The suite for integrations fails where one breaks a promise, by engines that are made of a dict."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import nullcontext

import pytest

from tiercache.testing.hosts import Answer, Host, HostConformance, Hosts, Node

PAGE = 64


class Toy(Host):
    """An engine whose answers follow from the prompt, and whose hits are the pages that a dict has."""

    def __init__(self, fault, storage, tenant, stored):
        self.fault, self.storage, self.stored, self.mine = fault, storage, stored, set()
        self.place = storage if fault == "tenants" else (storage, tenant)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mine.clear()

    def flush(self):
        self.mine.clear()

    kill = flush

    def ask(self, prompt, new=8):
        pages = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        below = self.stored[self.place] if self.fault != "forgets" and "damaged" not in self.stored else set()
        hits = next((n for n, page in enumerate(pages) if page not in self.mine | below), len(pages))
        if self.storage and self.fault == "partial":
            hits = hits * PAGE // 2 / PAGE
        draw = random.Random(str(prompt) + ("wrong" if hits and self.fault == "wrong" else ""))
        answer = Answer([draw.randrange(99) for _ in range(new)], [draw.random() for _ in range(new)], 0)
        if self.storage:
            self.mine.update(pages)
            self.stored[self.place].update(pages)
        return answer._replace(cached=int(hits * PAGE))


class Toys(Hosts):
    page = PAGE

    def __init__(self, fault):
        super().__init__()
        self.fault, self.stored = fault, defaultdict(set)

    def start(self, kind, storage, tenant=""):
        return Toy(self.fault, storage, tenant, self.stored)

    def node(self, directory):
        return nullcontext(type("Toy", (Node,), dict.fromkeys(Node.__abstractmethods__) | {"url": "grpc"})())


@pytest.mark.parametrize("fault", ["", "wrong", "partial", "forgets", "tenants"])
def test_the_suite_fails_where_a_promise_is_broken(fault, tmp_path):
    suite, hosts = HostConformance(), Toys(fault)
    with pytest.raises(AssertionError) if fault in ("wrong", "partial", "forgets") else nullcontext():
        suite.come_back(hosts, "hybrid", "file")
    with pytest.raises(AssertionError) if fault else nullcontext():
        suite.test_two_servers_on_one_daemon("hybrid", Toys(fault), tmp_path)
