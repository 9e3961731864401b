"""Alerts for real: Prometheus with our rules scrapes a daemon, and says when it is gone."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon.hosts import GUARD, Worker, key, serving, until
from tests.deploy.base import DEPLOY, tool
from tests.processes import free_port

pytestmark = pytest.mark.slow
ALERTS = re.findall(r"(?m)^### (Tiercache\w+)", (DEPLOY / "README.md").read_text())
PACE = "1s"
"""Interval of scrapes and of evaluations, in place of a quarter of a minute."""


class KilledError(Exception):
    """The daemon was killed on purpose."""


@contextmanager
def prometheus(here: Path, target: str) -> Iterator[Callable[[str], Any]]:
    """Prometheus with the settings of deploy/compose, which scrapes `target`; yields a call of its API."""
    program = tool("prometheus", "apt-get download prometheus, and unpack it")
    settings = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    rules = (DEPLOY / "prometheus/rules.yml").read_text()
    # What has to last for minutes lasts for seconds here.
    (here / "rules.yml").write_text(re.sub(r"for: (\d+)m", r"for: \1s", rules))
    settings["global"] = {"scrape_interval": PACE, "evaluation_interval": PACE}
    settings["rule_files"] = [str(here / "rules.yml")]
    [job] = settings["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (here / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    with (here / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={here}/prometheus.yml", f"--storage.tsdb.path={here}/data",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]

    def answers() -> bool:
        assert process.poll() is None, (here / "prometheus.log").read_text()
        try:
            return bool(ask("status/runtimeinfo"))
        except OSError:
            return False

    try:
        until(answers, GUARD)
        yield ask
    finally:
        process.terminate()
        process.wait(GUARD)


def test_prometheus_sees_a_daemon_and_tells_of_its_end(tmp_path: Path) -> None:
    body = f'directory = "{tmp_path}"\ndisk_bytes = "64MiB"\nhost_bytes = "48MiB"\n'
    port = free_port()
    body += f'[http]\nlisten = "127.0.0.1:{port}"\n'
    with (
        suppress(KilledError),
        serving(tmp_path, body) as daemon,
        prometheus(tmp_path, f"127.0.0.1:{port}") as ask,
    ):

        def value(query: str) -> float | None:
            found = ask(f"query?query={query}")["result"]
            return float(found[0]["value"][1]) if found else None

        def firing() -> set[str]:
            return {
                alert["labels"]["alertname"]
                for alert in ask("alerts")["alerts"]
                if alert["state"] == "firing"
            }

        with Worker(daemon) as client:
            client.set({key(n): b"x" * 1000 for n in range(5)})
        until(lambda: value("up") == 1, GUARD)
        until(lambda: value("tiercache_node_store_objects") == 5, GUARD)

        def rules() -> list[dict[str, Any]]:
            return [rule for group in ask("rules")["groups"] for rule in group["rules"]]

        until(lambda: {rule["health"] for rule in rules()} == {"ok"}, GUARD)
        assert {rule["name"] for rule in rules()} == set(ALERTS)
        time.sleep(5)  # long enough for every alert that would fire
        assert firing() == set()
        daemon.process.kill()
        daemon.process.wait(GUARD)
        until(lambda: "TiercacheDown" in firing(), GUARD)
        assert firing() == {"TiercacheDown"}
        raise KilledError
