"""Load or recompute in real servers: the choice of tiercache's plug-ins beside always and never loading.

    python -m tests.servers.recompute {connector,tree} ENVIRONMENT [ROUNDS]

`connector` is vLLM's, `tree` the cache in the place of SGLang's tree. Three servers of one model take turns:
over a store that keeps nothing (never), with `load_or_recompute` off (always), and on (choice). Before each
request, device and host are emptied; other servers are suspended, because SGLang polls while it waits. Six
mixes: a short or a long context, a store in the page cache or a slow one, one request or four at once. A JSON
line a mix: median milliseconds until each request has two tokens, and `behind`, the choice's time over the
better of the other two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from urllib.error import HTTPError

from tests.processes import free_port
from tests.servers.models import make_model
from tests.servers.server import Server
from tests.servers.sglang.server import SglangTreeServer
from tests.servers.vllm.server import VllmConnectorServer
from tests.waiting import until
from tiercache_lab.bench.timing import Side, medians

SHORT, LONG, ROUNDS = 256, 1536, 9
MIXES = (
    ("file", SHORT, 1), ("file", LONG, 1), ("file", LONG, 4),
    ("slow", SHORT, 1), ("slow", LONG, 1), ("slow", LONG, 4),
)  # fmt: skip
"""Store, tokens of a prompt, and prompts at once."""


class Connector(VllmConnectorServer):
    """vLLM with the connector, which chooses."""

    PAGE = 64
    DTYPES: ClassVar = {"wide": "float32"}
    WEIGHS = True

    def transfer(self, storage: str) -> dict[str, Any]:
        found = super().transfer(storage)
        found["kv_connector_extra_config"] |= {"host_bytes": "1GiB", "load_or_recompute": self.WEIGHS}
        return found


class AlwaysConnector(Connector):
    WEIGHS = False


class Tree(SglangTreeServer):
    SETTINGS: ClassVar = {**SglangTreeServer.SETTINGS, "load_or_recompute": True}


ENGINES: dict[str, tuple[type[Any], type[Any]]] = {
    "connector": (Connector, AlwaysConnector),
    "tree": (Tree, SglangTreeServer),
}


def side(name: str, server: Server, asked: list[list[int]]) -> Side:
    """Return the way of one server to two tokens for all prompts at once."""

    def ask(_: int) -> None:
        with ThreadPoolExecutor(len(asked)) as threads:
            list(threads.map(lambda prompt: server.ask(prompt, 2), asked))

    def begin(_: int) -> None:
        def is_empty() -> bool:
            with suppress(HTTPError):  # SGLang refuses while something is under way
                server.flush()
                return True
            return False

        signal_all(server, signal.SIGCONT)
        until(is_empty)

    return Side(name, ask, begin, lambda _: signal_all(server, signal.SIGSTOP))


def signal_all(server: Server, number: signal.Signals) -> None:
    for pid in server.processes():
        os.kill(pid, number)


def rows(engine: str, environment: Path, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each mix."""
    model, draw = make_model("wide", folder), Random(1)
    choosing, always = ENGINES[engine]
    for store in dict.fromkeys(store for store, *_ in MIXES):
        servers: dict[str, Server] = {}
        with ExitStack() as stack:
            for name, kind in {"never": choosing, "always": always, "choice": choosing}.items():
                url = f"{store}://{folder}/{store}-{name}?capacity=4GiB"
                url = "memory://?capacity=1MiB" if name == "never" else url  # which keeps nothing
                server = kind(environment, model, free_port(), folder / f"{store}-{name}.log", url)
                servers[name] = stack.enter_context(server)
                stack.callback(signal_all, server, signal.SIGCONT)
                signal_all(server, signal.SIGSTOP)
            for tokens, count in [(tokens, count) for of, tokens, count in MIXES if of == store]:
                asked = [[draw.randrange(3, 250) for _ in range(tokens + 1)] for _ in range(count)]
                took = medians([side(name, server, asked) for name, server in servers.items()], rounds)
                row = {"engine": engine, "store": store, "tokens": tokens, "at_once": count}
                behind = took["choice"] / min(took["never"], took["always"])
                yield row | {n: round(s * 1e3, 1) for n, s in took.items()} | {"behind": round(behind, 3)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        rounds = int(sys.argv[3]) if sys.argv[3:] else ROUNDS
        for row in rows(sys.argv[1], Path(sys.argv[2]), rounds, Path(place)):
            print(json.dumps(row), flush=True)
