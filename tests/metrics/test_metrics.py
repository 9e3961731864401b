"""The table of metrics, what is made of it, and the endpoint where it is scraped."""

from __future__ import annotations

import ast
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tiercache.core import PoolName
from tiercache.errors import StorageError
from tiercache.metrics import TABLE, Families, Metric, Metrics
from tiercache.metrics.document import markdown
from tiercache.metrics.endpoint import FRESH_SECONDS, MAX_CONNECTIONS, Endpoint
from tiercache.metrics.exposition import render
from tiercache.metrics.families import label_sets
from tiercache.metrics.instruments import Counter, Gauge, Histogram
from tiercache.metrics.table import Known

ROOT = Path(__file__).parent.parent.parent
KINDS = {
    "Counter",
    "Gauge",
    "Histogram",
    "Summary",
    "Info",
    "Enum",
    "CounterMetricFamily",
    "GaugeMetricFamily",
}

ROWS = (
    Metric(
        "things_total",
        Counter,
        "Things.",
        {"colour": ("red", "blue"), ("size", "shape"): (("big", "round"), ("small", "flat"))},
    ),
    Metric("level", Gauge, "A level."),
    Metric("seconds", Histogram, "Times.", {"who": Known("whoever")}),
)


# --- the table
# ------------------------------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_that_says_what_it_is() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert re.fullmatch("[a-z][a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind is Counter), row.name
        assert (row.kind is not Histogram) or row.name.endswith("_seconds")
        assert row.help.endswith(".")
        assert len(set(row.label_names)) == len(row.label_names)
        known = {name: ["one"] for name in row.label_names}
        sets = list(label_sets(row, known))
        assert len(set(sets)) == len(sets) <= 300, "each label set once, and not too many"


def test_no_metric_is_made_outside_the_table() -> None:
    for path in [*(ROOT / "tiercache").rglob("*.py"), *(ROOT / "storage_backends").rglob("*.py")]:
        if path.is_relative_to(ROOT / "tiercache" / "metrics"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client"):
                assert not KINDS & {alias.name for alias in node.names}, f"{path}:{node.lineno}"
            assert not (
                isinstance(node, ast.Import)
                and any(a.name.startswith("prometheus_client") for a in node.names)
            ), str(path)


def test_the_document_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "run `make docs`"
    used = set(
        re.findall(r"tiercache_(\w+)", "".join(re.findall(r"```promql\n(.*?)```", markdown(), re.DOTALL)))
    )
    assert {name.removesuffix("_bucket") for name in used} <= {row.name for row in TABLE}, (
        "queries name what there is"
    )


# --- families
# ------------------------------------------------------------------------------------------------------------


def test_every_label_set_is_there_at_0_and_joint_labels_only_in_their_combinations() -> None:
    families = Families(ROWS, who=["ann"])
    shown = {(s.name, *s.labels.values()): s.value for f in families.registry.collect() for s in f.samples}
    things = {key[1:]: value for key, value in shown.items() if key[0] == "tiercache_things_total"}
    assert things == {
        (colour, *joint): 0 for colour in ("red", "blue") for joint in (("big", "round"), ("small", "flat"))
    }  # fmt: skip
    assert shown["tiercache_level",] == 0
    assert shown["tiercache_seconds_count", "ann"] == 0
    with pytest.raises(KeyError):
        families.counter("things_total", "red", "big", "flat")
    families.add(who="bob")
    families.histogram("seconds", "bob").observe(1)
    assert families.total("seconds_count") == 1
    families.counter("things_total", "red", "big", "round").inc(3)
    assert families.total("things_total", colour="red") == families.total("things_total") == 3


def test_what_others_count_is_asked_at_each_scrape_and_may_be_missing() -> None:
    families = Families(ROWS)
    values: list[float | None] = [7, None]
    families.tell("level", {(): lambda: values.pop(0)})
    assert families.total("level") == 7
    assert "level" not in render(families.registry).decode()


def test_metrics_of_a_controller_have_its_pools_only() -> None:
    metrics = Metrics([PoolName.KV])
    metrics.increment("lookups_total", "host", "kv", "hit", "none")
    assert metrics.value("lookups_total", "host", "kv", "hit", "none") == 1
    text = render(metrics.registry).decode()
    assert 'pool="mamba"' not in text
    assert 'result="hit",tier="host"} 1.0' in text
    assert 'reason="absent",result="hit"' not in text, "a hit has no reason"


def test_the_text_parses_and_has_no_time_stamps_of_creation() -> None:
    families = Families(TABLE, pool=["kv"], store=["a"], principal=["b"], version=["1"], tier=["c"])
    text = render(families.registry).decode()
    assert "_created" not in text
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f"tiercache_{row.name}".removesuffix("_total") for row in TABLE} == parsed.keys()
    for row in TABLE:
        assert parsed[f"tiercache_{row.name}".removesuffix("_total")].type == row.kind.__name__.lower()


# --- the endpoint
# ------------------------------------------------------------------------------------------------------------


@contextmanager
def endpoint(**settings: float) -> Iterator[Endpoint]:
    registry = CollectorRegistry()
    Families(ROWS, registry)
    made = Endpoint("127.0.0.1", 0, registry, **settings)
    try:
        yield made
    finally:
        made.close()
    assert "tiercache-metrics" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def served() -> Iterator[Endpoint]:
    with endpoint() as made:
        yield made


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has not cut this connection, on which nothing was sent to us."""
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        sock.settimeout(30)
    return False


def ask(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def say(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
        return answer


def test_the_endpoint_gives_the_metrics_and_nothing_else(served: Endpoint) -> None:
    status, text = ask(served.port)
    assert status == 200
    assert "tiercache_level 0.0" in text
    assert ask(served.port, "/metrics?name[]=x")[0] == 200
    assert ask(served.port, "/")[0] == ask(served.port, "/metrics/../etc")[0] == 404
    assert ask(served.port, method="POST")[0] == ask(served.port, method="DELETE")[0] == 405


def test_nonsense_is_refused(served: Endpoint) -> None:
    assert say(served.port, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert say(served.port, b"GET /metrics\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert say(served.port, b"GET /metrics SMTP/1\r\n\r\n").startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", served.port), 30) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000)
        assert sock.recv(100).startswith(b"HTTP/1.1 431")
    assert ask(served.port)[0] == 200


def test_silent_clients_make_room_for_others_and_are_cut() -> None:
    with ExitStack() as ends:
        served = ends.enter_context(endpoint(seconds=1.0))
        before = threading.active_count()
        silent = [
            ends.enter_context(socket.create_connection(("127.0.0.1", served.port), 30)) for _ in range(100)
        ]
        for sock in silent[50:]:
            with suppress(OSError):  # some had to go already
                sock.sendall(b"GET /metr")
        for _ in range(5):
            assert ask(served.port)[0] == 200
        assert threading.active_count() == before
        assert sum(map(is_open, silent)) <= MAX_CONNECTIONS
        for sock in silent:
            with suppress(ConnectionResetError):
                assert sock.recv(10) == b""
        assert ask(served.port)[0] == 200


def test_a_client_that_drips_is_cut_in_time() -> None:
    with endpoint(seconds=0.5) as served:
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", served.port), 30) as sock, pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() < start + 10:
                sock.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - start < 5


def test_a_flood_of_scrapes_collects_now_and_then_only() -> None:
    families = Families(ROWS)
    asked: list[None] = []
    families.tell("level", {(): lambda: float(len(asked)) if asked.append(None) is None else None})
    served = Endpoint("127.0.0.1", 0, families.registry)
    start = time.monotonic()
    for _ in range(50):
        assert ask(served.port)[0] == 200
    took = time.monotonic() - start
    served.close()
    assert len(asked) <= 2 + took / FRESH_SECONDS


def test_a_port_in_use_is_told_in_one_sentence(served: Endpoint) -> None:
    with pytest.raises(
        StorageError,
        match=rf"^metrics.listen: 127.0.0.1:{served.port} cannot be served \(.*\); is the port in use",
    ) as told:
        Endpoint("127.0.0.1", served.port, CollectorRegistry())
    assert "\n" not in str(told.value)
    with pytest.raises(StorageError, match="is the port in use, or the address not of this machine"):
        Endpoint("192.0.2.1", 0, CollectorRegistry())


def test_it_serves_ipv6() -> None:
    try:
        made = Endpoint("::1", 0, CollectorRegistry())
    except StorageError:
        pytest.skip("no IPv6 here")
    with socket.create_connection(("::1", made.port), 10) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    made.close()
    made.close()
