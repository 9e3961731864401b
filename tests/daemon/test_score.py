"""POST /score of a daemon: what the workers that it follows can restore, and who is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import IDENTITY, Engine, P, prompt
from tests.daemon.hosts import secret
from tests.daemon.test_http import serving
from tests.daemon.web import Answer, ask
from tests.events.rig import ANY
from tests.waiting import until
from tiercache.config.models import Settings
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError
from tiercache.keys import namespace_of, page_keys

NAMESPACE = namespace_of(IDENTITY)
TOKEN = "router-" + "r" * 32
WORKER = [{"endpoint": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:2"}]


def followed(engine: Engine) -> list[dict[str, str]]:
    publisher = engine.controller.publisher
    return [{"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}]


def body(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageServer]:
    """A daemon that nobody may ask but a router and a tenant."""
    tenants = {"acme": {"salt_file": secret(tmp_path / "salt", "s" * 40)}}
    principals = [
        {"name": "router", "token_file": secret(tmp_path / "router", TOKEN), "verbs": ["observe"]},
        {"name": "acme", "token_file": secret(tmp_path / "acme", "a" * 40), "tenant": "acme"},
    ]
    more: dict[str, Any] = {"listen": ["127.0.0.1:0"], "score": {"workers": {"away": WORKER}}}
    with serving(tmp_path, principals=principals, tenants=tenants, **more) as made:
        yield made


def score(node: StorageServer, query: str, data: bytes, token: str = TOKEN) -> Answer:
    path = f"/score?namespace={NAMESPACE.hex()}{query}"
    return ask(node.http_address, path, "POST", body=data, Authorization=f"Bearer {token}")


def test_the_score_of_a_worker_is_what_its_controller_restores(tmp_path: Path) -> None:
    options = ControllerOptions(restore_deadline=10.0, events=ANY)
    with MemoryBackend() as store:
        engines = {"warm": Engine(store, options=options), "cold": Engine(options=options)}
        workers = {name: followed(engine) for name, engine in engines.items()}
        with serving(tmp_path, score={"workers": workers}) as node:

            def told(tokens: list[int], of: str = "tokens") -> dict[str, list[int]]:
                data = body(tokens) if of == "tokens" else b"".join(page_keys(NAMESPACE, tokens, P))
                found = json.loads(score(node, f"&of={of}", data).text)
                return {name: [*depths.values()] for name, depths in found["workers"].items()}

            engine = engines["warm"]
            engine.keep(prompt(1, 2, 3))
            asked = prompt(1, 2, 3, 4)
            engine.controller.tick()
            until(lambda: told(asked) == {"warm": [3 * P] * 3, "cold": [0] * 3})
            # A page without its state is no hit, and the last token is always computed.
            assert told(prompt(1, 2))["warm"] == told(prompt(1, 9))["warm"] == [0] * 3
            assert told(prompt(1, 2, 3))["warm"] == [2 * P] * 3
            assert told(prompt(1, 2, 3), "keys")["warm"] == [3 * P] * 3
            for tier, left in ((Tier.DEVICE, [0, 3 * P, 3 * P]), (Tier.HOST, [0, 0, 3 * P])):
                engine.controller.evict(tier)
                engine.controller.tick()
                until(lambda: told(asked)["warm"] == left)  # noqa: B023
            assert engine.serve(asked) == 3 * P


class Backend(BaseHTTPRequestHandler):
    """An engine's port, which answers with what it was sent."""

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


def test_the_example_of_a_router_sends_a_prompt_where_it_is_kept(tmp_path: Path) -> None:
    engines = [Engine(options=ControllerOptions(restore_deadline=10.0, events=ANY)) for _ in range(2)]
    ports = [ThreadingHTTPServer(("127.0.0.1", 0), Backend) for _ in engines]
    workers = {f"pod-{n}": followed(engine) for n, engine in enumerate(engines)}
    prompts = [prompt(n, n + 1, n + 2, 9) for n in (1, 5)]
    with serving(tmp_path, score={"workers": workers}) as node, ExitStack() as ends:
        for port in ports:
            Thread(target=port.serve_forever, daemon=True).start()
            ends.callback(port.server_close)
            ends.callback(port.shutdown)
        for engine, asked in zip(engines, prompts, strict=True):
            engine.keep(asked[:-P])
            engine.controller.tick()
        urls = [f"pod-{n}=http://127.0.0.1:{port.server_port}" for n, port in enumerate(ports)]
        command = [sys.executable, "examples/router.py", "127.0.0.1:0", NAMESPACE.hex()]
        command += [f"http://{node.http_address}", *urls]
        router = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ends.callback(router.terminate)
        assert router.stdout is not None
        address = f"127.0.0.1:{router.stdout.readline().split()[-1]}"

        def routed(tokens: list[int]) -> str | None:
            sent = json.dumps({"prompt": tokens}).encode()
            answer = ask(address, "/v1/completions", "POST", body=sent)
            assert (answer.status, answer.text.encode()) == (200, sent)
            return answer.headers["X-Worker"]

        until(lambda: [routed(asked) for asked in prompts] == ["pod-0", "pod-1"])
        assert ask(address, "/v1/completions", "POST", body=b'{"prompt": "text"}').status == 400
        assert node.stop()
        assert routed(prompts[1]) == "pod-0", "without scores, the load alone decides"


def test_only_who_observes_is_told_and_nonsense_is_a_sentence(node: StorageServer) -> None:
    prompts = body([1, 2, 3])
    assert json.loads(score(node, "", prompts).text) == {
        "workers": {"away": {"GPU": 0, "CPU": 0, "STORAGE": 0}}
    }
    assert ask(node.http_address, "/score", "POST", body=prompts).status == 401
    assert score(node, "", prompts, "a" * 40).status == 403
    assert score(node, "", prompts[:-1]).status == score(node, "&of=text", prompts).status == 400
    assert score(node, "&of=keys", prompts).text.startswith("the body is not as the query says")
    assert score(node, "0", prompts).status == 400
    assert score(node, "", bytes(2 << 20)).status == 413
    assert ask(node.http_address, "/score", Authorization=f"Bearer {TOKEN}").status == 405


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": {"a": [{"endpoint": "tcp://127.0.0.1:1"}]}}, "workers.a: give endpoint and replay"),
        ({"workers": {"a": [{"endpoint": "http://a", "replay": "ipc:///b"}]}}, "no address for KV events"),
        ({"workers": {"a": WORKER}}, "give http.listen"),
    ],
)
def test_workers_that_cannot_be_followed_are_refused(tmp_path: Path, given: Any, said: str) -> None:
    http = {} if "listen" in said else {"listen": "127.0.0.1:0"}
    with pytest.raises(ConfigError, match=said):
        Settings(directory=tmp_path, http=http, score=given).check()  # type: ignore[arg-type]


def test_without_workers_there_are_no_scores(tmp_path: Path) -> None:
    with serving(tmp_path) as node:
        assert score(node, "", b"").status == 404
