"""tiercache in the place of SGLang's prefix tree, in a real server, beside SGLang's own tree."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import free_port, suspend
from tests.servers.conftest import Expected, environment_of
from tests.servers.daemon import Daemon
from tests.servers.models import MODELS, make_model
from tests.servers.sglang.server import SglangServer, SglangTreeServer
from tests.waiting import until
from tiercache.core import PoolName
from tiercache.storage.registry import open_backend
from tiercache.testing.hosts import PROMPTS, Answer, check, whole_pages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
Start = Callable[..., SglangServer]
PAGE = SglangServer.PAGE
OURS = ("--radix-cache-backend", "tiercache")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
FEW = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {**FEW, "max_new_tokens": 400}


@pytest.fixture(scope="session")
def engine() -> type[SglangServer]:
    """The only engine here."""
    return SglangServer


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Start:
    """A function that starts a server of a model with these arguments; all of a test write one log."""

    def begin(model: str, *arguments: object, **options: bool) -> SglangServer:
        path, log = make_model(model, models), tmp_path / "server.log"
        return SglangServer(environment_of(SglangServer), path, free_port(), log, None, *arguments, **options)

    return begin


def settings(**given: object) -> list[str]:
    return [*OURS, "--hicache-storage-backend-extra-config", json.dumps(given)]


def conversations(server: SglangServer, turns: int = 4, talks: int = 6) -> list[Answer]:
    """More than the pools hold: turns of several conversations that take turns, and one-off prompts."""
    draw = random.Random(3)
    told: list[list[int]] = [[draw.randrange(3, 250) for _ in range(330)] for _ in range(talks)]
    answers = []
    for _ in range(turns):
        for talk in told:
            answers.append(server.ask(talk, 6))
            talk += [*answers[-1].tokens, *(draw.randrange(3, 250) for _ in range(330))]
        answers.append(server.ask([draw.randrange(3, 250) for _ in range(900)], 6))
    return answers


@pytest.mark.parametrize("model", MODELS)
def test_hits_and_answers_beside_those_of_sglang_s_tree(model: str, start: Start, expected: Expected) -> None:
    with start(model, "--max-total-tokens", "6144") as theirs:
        right = conversations(theirs)
    with start(model, "--max-total-tokens", "6144", *settings(policy="lru")) as ours:
        assert "tiercache: index and policy lru" in ours.said()
        first = [ours.ask(asked) for asked in PROMPTS]
        check(first, expected(model), when="first")
        again = [ours.ask(asked) for asked in PROMPTS]
        check(again, expected(model), when="again")
        assert [answer.cached for answer in again] == whole_pages(PAGE)
        ours.flush()
        found = conversations(ours)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
        assert sum(answer.cached for answer in found) >= sum(answer.cached for answer in right)
        ours.flush()
        assert ours.ask(PROMPTS[0]).cached == 0, "a flush leaves nothing"
    with start(model, "--max-total-tokens", "6144", *OURS) as valued:
        found = conversations(valued)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
        for server in (theirs, ours, valued):
            assert "memory leak" not in server.said().lower()


def crowd(server: SglangServer, asked: list[list[int]]) -> dict[int, Answer]:
    """Ask all prompts at once, some of them several times over; some clients go away before the answer."""
    answers: dict[int, Answer] = {}

    def ask(n: int) -> None:
        if n % 7 == 3:
            with suppress(OSError):
                server.post("/generate", {"input_ids": asked[n], "sampling_params": LONG}, timeout=0.4)
        elif n % 7 == 5:
            found = server.post("/generate", {"input_ids": asked[n], "sampling_params": {**FEW, "n": 4}})
            assert len({tuple(one["output_ids"]) for one in found}) == 1, "greedy answers are equal"
        else:
            answers[n] = server.ask(asked[n], 8)

    with ThreadPoolExecutor(64) as clients:
        list(clients.map(ask, range(len(asked))))
    return answers


@pytest.mark.parametrize("model", MODELS)
def test_64_at_once_in_pools_that_are_too_small(model: str, start: Start) -> None:
    """Overlapping batches, prefills in chunks, requests taken back, four answers, clients that go away."""
    draw = random.Random(7)
    shared = [[draw.randrange(3, 250) for _ in range(700)] for _ in range(4)]
    asked = [
        [
            *shared[draw.randrange(4)][: draw.choice([0, 100, 700])],
            *(draw.randrange(3, 250) for _ in range(size)),
        ]
        for size in (draw.choice([5, 90, 400, 1300]) for _ in range(64))
    ]
    sizes = ["--max-total-tokens", "4096", "--chunked-prefill-size", "512", "--max-running-requests", "6"]
    with start(model, *sizes, *OURS, overlap=True) as server:
        rounds = [crowd(server, asked) for _ in range(2)]
        server.flush()
        alone = {n: server.ask(asked[n], 8) for n in sorted(rounds[0])}
        for found in rounds:
            assert {n: one.tokens for n, one in found.items()} == {n: one.tokens for n, one in alone.items()}
        assert sum(one.cached for one in rounds[1].values()) > 0
        said = server.said().lower()
        assert "memory leak" not in said
        assert "exception" not in said


def test_what_is_not_served_is_refused_at_the_start(start: Start) -> None:
    for arguments, why in [
        (["--disable-radix-cache"], "does not serve --disable-radix-cache"),
        (["--enable-hierarchical-cache", "--hicache-write-policy", "write_back"], "does not serve"),
        (settings(policy="best")[2:], "there is no eviction policy 'best'"),
        (settings(polcy="lru")[2:], "polcy"),
        ([*HOST, "--hicache-storage-backend", "file"], "hicache-storage-backend other than dynamic"),
        (settings(storage="memory://")[2:], "a storage needs --enable-hierarchical-cache"),
    ]:
        server = start("llama", *OURS, *arguments)
        with pytest.raises(AssertionError, match="the server ended"):
            server.ready()
        server.kill()
        assert why in server.said()


@pytest.mark.parametrize("ranks", [(), ("--tp", "2")], ids=["one rank", "two"])
@pytest.mark.parametrize("model", MODELS)
def test_the_host_keeps_what_the_device_gave_up(model, ranks, start, expected):
    sizes = ["--max-total-tokens", "4096", "--max-running-requests", "4"]
    with start(model, *sizes, *HOST, *ranks, *OURS, overlap=True) as server:
        first = [server.ask(asked) for asked in PROMPTS]
        check(first, expected(model), when="first")
        for _ in range(4):  # others take the device
            server.ask([random.randrange(3, 250) for _ in range(2000)])
        again = [server.ask(asked) for asked in PROMPTS]
        check(again, expected(model), when="from the host")
        assert [answer.cached for answer in again] == whole_pages(PAGE)
        right = conversations(server)
        server.post("/hicache/storage-backend/clear")
        server.flush()
        assert server.ask(PROMPTS[0]).cached == 0, "a flush leaves nothing"
        found = conversations(server)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
        with ThreadPoolExecutor(16) as clients:
            together = list(clients.map(server.ask, PROMPTS * 4))
        check(together[: len(PROMPTS)], expected(model), when="together")
        assert "memory leak" not in server.said().lower()
        assert "exception" not in server.said().lower()
        if ranks:
            named = {Path(f"/proc/{pid}/cmdline").read_text(): pid for pid in server.processes()}
            rank = next(pid for name, pid in named.items() if "scheduler_TP1" in name)
            suspend(rank)
            with ThreadPoolExecutor(len(PROMPTS)) as clients:
                hung = clients.map(server.ask, PROMPTS)
                time.sleep(5)
                os.kill(rank, signal.SIGCONT)
                check(list(hung), expected(model), when="a rank hangs")
            server.lose(rank)


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_over_a_store(model: str, models: Path, tmp_path: Path, expected: Expected) -> None:
    """Every way back, for both ranks or for neither; a daemon that hangs costs hits."""
    right, whole, none = expected(model), whole_pages(PAGE), [0] * len(PROMPTS)
    path, log, where = make_model(model, models), tmp_path / "server.log", environment_of(SglangServer)

    def cached(when: str) -> list[int]:
        answers = [server.ask(asked) for asked in PROMPTS]
        check(answers, right, when=when)
        return [answer.cached for answer in answers]

    def comes_back(when: str) -> bool:  # a daemon that gets no CPU in time costs hits
        server.flush()
        return cached(when) == whole

    with Daemon(tmp_path / "node") as daemon:
        for life in range(2):
            with SglangTreeServer(where, path, free_port(), log, daemon.url, "--tp", "2") as server:
                assert any(cached("first")) == bool(life)
                until(lambda: comes_back("from the store"), 600)
                with open_backend(daemon.url.replace("2s", "60s")) as store:
                    keys = [entry.key for entry in store.scan_all()]
                    theirs = min(key.layout for key in keys if key.pool is PoolName.KV)
                    store.delete([key for key in keys if key.layout == theirs])
                server.flush()
                assert cached("one rank has nothing") == none
                until(lambda: comes_back("stored anew"), 600)
                daemon.hang()
                server.flush()
                assert cached("the daemon hangs") == none
                daemon.go_on()
                until(lambda: comes_back("the daemon is back"), 600)
        assert "memory leak" not in server.said().lower()
        assert "exception" not in server.said().lower()


def test_the_store_serves_nobody_else_and_no_other_weights(models, tmp_path, expected):
    path, right, whole = make_model("qwen3next", models), expected("qwen3next"), whole_pages(PAGE)
    store, log = f"file://{tmp_path}/store?capacity=256MiB", tmp_path / "server.log"
    with SglangTreeServer(environment_of(SglangServer), path, free_port(), log, store) as server:

        def cached(when: str) -> list[int]:
            server.flush()
            answers = [server.ask(asked) for asked in PROMPTS]
            check(answers, right, when=when)
            return [answer.cached for answer in answers]

        none = [0] * len(PROMPTS)
        assert cached("first") == none
        assert cached("flushed") == whole
        other = {"input_ids": PROMPTS[0], "sampling_params": FEW, "extra_key": "another tenant"}
        found = server.post("/generate", other)
        assert (found["output_ids"], found["meta_info"]["cached_tokens"]) == (right[0].tokens, 0)
        server.post("/hicache/storage-backend/clear")
        until(lambda: "of this cache deleted from storage" in server.said())
        assert cached("cleared") == none
        assert server.post("/update_weights_from_disk", {"model_path": str(path)})["success"]
        assert cached("new weights") == none
        assert cached("stored anew") == whole
