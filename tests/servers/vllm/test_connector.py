"""Real servers of vLLM with tiercache's connector: kinds of groups, crowds in few blocks, refused starts."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.processes import free_port
from tests.servers.conftest import environment_of
from tests.servers.models import make_model
from tests.servers.vllm.server import VllmApartServer, VllmConnectorServer, VllmRanksServer
from tests.waiting import until
from tiercache.testing.hosts import PROMPTS, Answer, HostConformance, ask_all, cached, check, damage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def apart(one: Answer, other: Answer) -> float:
    """How far odds differ up to the token, included, at which one answer begins to be another."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    end = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs)) + 1
    return max(abs(a - b) for a, b in zip(one.logprobs[:end], other.logprobs[:end], strict=True))


class Fine(VllmConnectorServer):
    PAGE = 64


class Mixed(VllmConnectorServer):
    """A server whose layers with a window have blocks twice as long as the others."""

    PAGE, BLOCK = 128, 64


MODELS = [
    (Mixed, "gemma4"),
    *((Fine, model) for model in ("gemma2", "gemma3", "gptoss", "mistral", "llama4")),
    *((VllmConnectorServer, model) for model in ("falconh1", "granite4")),
]


@pytest.mark.parametrize(("engine", "model"), MODELS, indirect=["engine"], ids=[model for _, model in MODELS])
def test_windows_and_states_of_other_kinds_come_back(model, hosts, start, tmp_path):
    right, store = hosts.right(model), tmp_path / "store"
    url = f"file://{store}?capacity=256MiB"
    HostConformance.come_back(hosts, model, url)
    with start(model, url) as server:
        damage(store, 1 << 14)
        damaged = ask_all(server)
        check(damaged, right, when="damaged")
        assert sum(cached(damaged)) < sum(hosts.whole)
        check(ask_all(server), right, when="again")


@pytest.mark.parametrize("model", ["llama", "qwen3next"])
@pytest.mark.parametrize("engine", [VllmApartServer, VllmRanksServer], indirect=True)
def test_workers_in_processes_of_their_own(engine, model, hosts, start, tmp_path):
    """All ways back; then one rank's bytes are damaged: what only the other has counts for nothing."""
    right = hosts.right(model)
    store = str(tmp_path / "store-{rank}")
    url = f"file://{store}?capacity=256MiB"
    HostConformance.come_back(hosts, model, url)
    with start(model, url) as server:
        found = [path for path in sorted(tmp_path.iterdir()) if path.name.startswith("store-")]
        assert len(found) == (2 if engine is VllmRanksServer else 1)
        damage(found[-1], 1 << 14)
        damaged = ask_all(server)
        check(damaged, right, when="damaged")
        assert sum(cached(damaged)) < sum(hosts.whole)
        check(ask_all(server), right, when="again")


@pytest.mark.parametrize("engine", [Fine], indirect=True)
def test_an_answer_comes_back_with_its_last_whole_page(engine, start, tmp_path):
    asked, url = PROMPTS[0], f"file://{tmp_path}/store?capacity=64MiB"
    with start("llama", url) as server, start("llama", None) as without:
        for count in (70, 300):
            answer = server.ask(asked, count)
            assert answer.tokens == without.ask(asked, count).tokens
            server.flush()
            more = [*asked, *answer.tokens, 5]
            again = server.ask(more)
            assert again.cached == (len(more) - 2) // engine.PAGE * engine.PAGE
            check([again], [without.ask(more)], when=f"behind {count} tokens")


class Failing(VllmConnectorServer):
    def transfer(self, storage: str) -> dict[str, Any]:
        return super().transfer(storage) | {"kv_load_failure_policy": "fail"}


class Unsized(VllmConnectorServer):
    SIZED = False


@pytest.mark.parametrize(
    ("kind", "model", "why"),
    [
        (Failing, "llama", "a kv_load_failure_policy other than"),
        (Unsized, "falconh1", "states on a CPU without --block-size; start vLLM with --block-size 256"),
    ],
)
def test_a_server_that_is_not_served_does_not_start(kind, model, why, models, tmp_path):
    path = make_model(model, models)
    server = kind(environment_of(kind), path, free_port(), tmp_path / "log", "memory://?capacity=64MiB")
    with pytest.raises(AssertionError, match="the server ended"):
        server.ready()
    server.kill()
    assert f"TierCacheConnector does not serve {why}" in server.said()


def crowd(server: VllmConnectorServer, asked: list[list[int]]) -> list[tuple[int, Answer]]:
    """Ask all prompts at once, some of them several times over; some clients go away before the answer."""
    answers: list[tuple[int, Answer]] = []

    def ask(n: int) -> None:
        if n % 7 == 3:
            with suppress(OSError):
                server.answers(asked[n], 400, timeout=0.1 * (n % 5 + 1))
        else:
            # vLLM takes several greedy answers for a mistake.
            greedy: dict[str, object] = {"n": 4, "temperature": 1, "top_k": 1} if n % 7 == 5 else {}
            answers.extend((n, one) for one in server.answers(asked[n], 40, **greedy))

    with ThreadPoolExecutor(64) as clients:
        list(clients.map(ask, range(len(asked))))
    return answers


@pytest.mark.parametrize(
    ("kind", "model", "blocks", "rounding"),
    [(Fine, "llama", 40, 1e-3), (VllmConnectorServer, "qwen3next", 24, 0.6)],
)
def test_64_at_once_in_few_blocks_over_a_full_store(kind, model, blocks, rounding, models, tmp_path):
    """Batches, requests taken back, four answers, clients that go away; then what `/metrics` says of it."""
    draw = random.Random(7)
    shared = [[draw.randrange(3, 250) for _ in range(1200)] for _ in range(4)]
    asked = [
        [*shared[n % 4][: draw.choice([0, 600, 1200])], *(draw.randrange(3, 250) for _ in range(size))]
        for n, size in enumerate(draw.choice([5, 90, 300, 400]) for _ in range(64))
    ]
    store, path = tmp_path / "store", make_model(model, models)
    sizes = ("--max-model-len", 2048, "--num-gpu-blocks-override", blocks, "--max-num-seqs", 8)
    url = f"file://{store}?capacity=4MiB"
    with kind(environment_of(kind), path, free_port(), tmp_path / "log", url, *sizes) as server:
        rounds = [crowd(server, asked) for _ in range(2)]
        server.flush()
        alone = {n: server.ask(asked[n], 40) for n in {n for n, _ in rounds[0]}}
        assert max(apart(one, alone[n]) for found in rounds for n, one in found) < rounding
        server.answers(asked[0], 8, kv_transfer_params={"tiercache": {"pin": "10m"}})

        def counted(name: str, label: str) -> float:
            return sum(value for labels, value in server.metrics(name).items() if label in labels)

        def pinned() -> float:
            server.ask(asked[0])  # a step tells what has been counted
            return counted("tiercache_pins_total", "taken")

        until(pinned)
        assert counted("vllm:num_preemptions_total", "") > 0
        assert counted("tiercache_tokens_total", "restored") > 0
        assert counted("tiercache_restored_bytes_total", "host") > 0
        assert counted("tiercache_written_bytes_total", "storage") > 0
        assert counted("tiercache_lookups_total", 'reason="absent"') > 0
        assert "a call of vLLM failed" not in server.said()
    assert sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file()) <= 4 << 20
