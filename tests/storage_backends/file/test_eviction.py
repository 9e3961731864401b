"""Room in a full `file` store: fragments, policies, settings."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from tiercache_backends.file import FileBackend

from tests.faults import FaultEnv
from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import at_log
from tiercache.errors import ConfigError
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.testing.conformance.hooks import STORED
from tiercache.testing.objects import NAMESPACE, chain, fetch, key, outcomes, payload, put, state_of, to_set

CAPACITY = 24 << 20


@pytest.mark.parametrize(("first", "second"), [(20_000, 700_000), (700_000, 20_000), (8192, 1 << 20)])
def test_space_stays_usable_when_sizes_change(tmp_path: Path, first: int, second: int) -> None:
    random = Random(5)
    with FileBackend(str(tmp_path / "s"), 32 << 20, io="buffered") as store:
        names = [("first", n) for n in range(20 * (1 << 20) // first)]
        assert outcomes(store.set([to_set(key(n), payload(n, first)) for n in names])) == {STORED: len(names)}
        gone = random.sample(names, len(names) // 2)
        store.delete([key(n) for n in gone])
        room = store.usage()
        free = room.details["blocks_free"]
        assert isinstance(free, int)
        assert store.usage().details["evicted"] == 0
        fitting = int(free * 4096 * 0.95) // (-(-second // 4096) * 4096)
        others = [("second", n) for n in range(fitting)]
        assert outcomes(store.set([to_set(key(n), payload(n, second)) for n in others])) == {STORED: fitting}
        assert int(store.usage().details["evicted"]) <= len(names) // 20, "what was free could be had"
        for n in [*random.sample(others, min(20, fitting)), *[n for n in names if n not in set(gone)][-20:]]:
            size = first if n[0] == "first" else second
            assert fetch(store, key(n), size) == payload(n, size)
        check_tables(store)


def test_a_set_into_a_full_store_takes_one_transaction(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), 8 << 20, env=env) as store:
        for n in range(200):
            put(store, key(n), payload(n, 60_000))
        env.clear()
        writes = at_log(env, lambda real, arguments: real(*arguments))
        for n in range(200, 260):
            assert put(store, key(n), payload(n, 60_000)) is STORED
        assert len(writes) == 60, "what must go goes along with what comes"


def turn_of(name: object, pages: int) -> list[SetItem]:
    """A sequence of pages of two blocks, with a state of fifty blocks at its end."""
    items = [
        to_set(k, payload(k, 8192), parent=up, depth=n) for n, (k, up) in enumerate(chain(name, pages), 1)
    ]
    state = state_of((name, pages - 1))
    return [*items, to_set(state, payload(state, 200_000), parent=state.page_key, depth=pages)]


def test_a_large_set_of_small_objects_evicts_nothing_while_there_are_blocks(tmp_path: Path) -> None:
    """One transaction has no room for all records beside the old ones; several have."""
    with FileBackend(str(tmp_path / "s"), 16 << 20) as store:
        store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        old = [turn_of(("old", n), 250) for n in range(5)]
        for items in old:
            assert outcomes(store.set(items)) == {STORED: 251}
        *pages, state = turn_of("new", 300)
        assert outcomes(store.set(pages)) == {STORED: 300}
        assert store.set([state]) == [STORED]
        assert int(store.usage().details["evicted"]) == 0
        assert store.usage().details["restorable_bytes"] == store.usage().payload_bytes


def test_what_can_be_restored_stays_while_there_is_room_for_what_comes(tmp_path: Path) -> None:
    with FileBackend(str(tmp_path / "s"), 16 << 20) as store:
        store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        for n in range(6):
            store.set(turn_of(("old", n), 250))
        used: list[int] = []
        for n in range(500):
            before = store.usage().details
            store.set([to_set(key(("small", n)), payload(n, 4096), namespace=b"plain")])
            after = store.usage().details
            if after["evicted"] != before["evicted"]:
                used.append(int(before["blocks_used"]))
        budget = int(after["blocks_used"]) + int(after["blocks_free"])
    assert used
    assert min(used) >= budget - 2, "a unit of 251 objects went, and nothing needed its room"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("io=fast", "'fast' is not possible; use auto or buffered"),
        ("durability=none", "use process or power"),
        ("mac_key=secret", "this is not an absolute path"),
        ("cap=1", ("has no setting 'cap'; it has access, capacity, durability, io, mac_key, path")),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB&{setting}")
    assert not (tmp_path / "s").exists()


def test_a_store_of_an_older_format_starts_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    with FileBackend(str(path), CAPACITY) as store:
        put(store, key("a"), payload("a", 9000))
    form = json.loads((path / "format").read_text())
    (path / "format").write_text(json.dumps({k: v for k, v in form.items() if k != "mac"} | {"version": 1}))
    with FileBackend(str(path), CAPACITY) as store:
        assert store.usage().objects == 0
        assert put(store, key("a"), payload("a", 9000)) is STORED
    assert "has format 1" in caplog.text
    with FileBackend(str(path), CAPACITY) as store:
        assert fetch(store, key("a"), 9000) == payload("a", 9000)
