"""A worker on a daemon: what `report` counts and what `explain` answers is what the worker has restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.integrations.transformers.models import PAGE, loaded
from tests.integrations.transformers.serving import LONG, serving, settle
from tests.storage_backends.grpc.nodes import daemon_settings, section
from tiercache.core import Tier
from tiercache.daemon import StorageServer
from tiercache.integrations.transformers.arguments import known_profile
from tiercache.storage.registry import open_backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_worker_s_restore_is_reported_and_explained(name: str, tmp_path: Path) -> None:
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node:
        place = section("unix", str(node.settings.socket_directory), timeout="60s")
        target = f"grpc://{node.settings.socket_directory}?timeout=60s"
        with serving(name, open_backend({"type": "grpc", **place})) as worker:
            worker.serve(LONG[1], 2)
            settle(worker)
        with serving(name, open_backend({"type": "grpc", **place})) as worker:
            served = worker.serve(LONG[1], 2)
            assert (served.tier, served.restored > 0) == (Tier.STORAGE, True)
            settle(worker)
        profile = known_profile(loaded(name)[0].model)
        assert profile is not None
        [row] = call("report", "-s", target, "-o", "jsonl").lines
        assert row["restored_tokens"] == served.restored
        assert row["saved_flops"] == served.restored * round(profile.flops_per_token)
        prompt = tmp_path / "prompt.json"
        prompt.write_text(json.dumps([int(token) for token in LONG[1]]))
        [found] = call("explain", "--tokens", prompt, "-s", target, "-o", "json").document["namespaces"]
        assert found["page_size"] == PAGE
        assert found["restorable"]["tokens"] >= served.restored
        # Without its states, or its first page, nothing of a hybrid model can be restored.
        with open_backend({"type": "grpc", **place}) as store:
            entries = list(store.scan_all())
            gone = [entry.key for entry in entries if entry.key.pool != "kv"] or [
                entry.key for entry in entries if entry.meta.depth == 1
            ]
            assert all(store.delete(gone))
        [found] = call("explain", "--tokens", prompt, "-s", target, "-o", "json", ok=6).document["namespaces"]
        assert found["restorable"]["tokens"] == 0
        assert found["gaps"][-1]["reason"] == "deleted"
