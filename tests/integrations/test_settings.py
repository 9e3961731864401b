"""The store that an engine's configuration names: one URL, or a chain of several, for one process or many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.integrations.settings import StoreSettings
from tiercache.models.profile import CONFIGS, profile_named
from tiercache.settings import read_section
from tiercache.storage.base import FLOPS_FIELD
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import fetch, key, payload, put

KEY, DATA = key("page"), payload("page", 5000)


def settings(*urls: str) -> StoreSettings:
    return read_section(StoreSettings, "test", {"storage": list(urls), "revision": "1"})


def file_url(path: Path) -> str:
    return f"file://{path}?capacity=64MiB"


def lmdb_url(path: Path) -> str:
    return f"lmdb://{path}?capacity=16MiB"


def test_one_url_is_its_store_also_in_a_list(tmp_path: Path) -> None:
    url = file_url(tmp_path)
    for given in (url, [url]):
        with read_section(StoreSettings, "test", {"storage": given, "revision": "1"}).open("0", 1) as store:
            assert store.usage().tiers == ()


def test_several_urls_are_a_chain_whose_tiers_hold_what_was_flushed(tmp_path: Path) -> None:
    urls = [file_url(tmp_path / "fast"), lmdb_url(tmp_path / "slow")]
    with settings(*urls).open("0", 1) as store:
        put(store, KEY, DATA)
        store.flush()
        assert [tier.name for tier in store.usage().tiers] == ["file", "lmdb"]
    for url in urls:
        with open_backend(url) as tier:
            assert fetch(tier, KEY, len(DATA)) == DATA


def test_the_rank_replaces_its_placeholder_in_every_url(tmp_path: Path) -> None:
    given = settings(file_url(tmp_path / "{rank}" / "a"), file_url(tmp_path / "b-{rank}"))
    with given.open("tp0", 2) as one, given.open("tp1", 2) as other:
        put(one, KEY, DATA)
        assert other.exists([KEY]) == [False]
    assert {path.name for path in tmp_path.iterdir()} == {"tp0", "tp1", "b-tp0", "b-tp1"}
    assert given.per_rank


def test_a_tier_per_rank_above_a_tier_for_all(tmp_path: Path) -> None:
    """The lower tier, which all ranks share, gives a rank what another one has stored."""
    given = settings(file_url(tmp_path / "{rank}"), lmdb_url(tmp_path / "all"))
    assert not given.per_rank
    with given.open("tp0", 2) as one:
        put(one, KEY, DATA)
        one.flush()
    with given.open("tp1", 2) as other:
        assert fetch(other, KEY, len(DATA)) == DATA


@pytest.mark.parametrize("order", [1, -1])
def test_processes_that_cannot_share_one_of_the_tiers_are_refused(tmp_path: Path, order: int) -> None:
    alone = file_url(tmp_path / "alone")
    given = settings(*[alone, lmdb_url(tmp_path / "all")][::order])
    with pytest.raises(ConfigError, match=r"alone.* can be opened by one process at a time, and this engine"):
        given.open("0", 2)
    assert list(tmp_path.iterdir()) == [], "the refusal comes before anything is opened"
    given.open("0", 1).close()


def test_a_wrong_setting_of_a_tier_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no setting 'tier_speed'; it has tier_deadline"):
        settings(file_url(tmp_path) + "&tier_speed=high", "memory://").open("0", 1)


def test_the_record_has_the_flops_of_the_model_if_they_are_known(tmp_path: Path) -> None:
    def recorded(model: str, **more: str) -> object:
        found = read_section(StoreSettings, "test", {"storage": "memory://", "revision": "1", **more})
        return found.record(found.identity(model, "bfloat16", 64)).identity.get(FLOPS_FIELD)

    expected = round(profile_named("qwen3-next-80b-a3b").flops_per_token)
    assert recorded("org/some-name") is None
    assert recorded("org/some-name", profile="qwen3-next-80b-a3b") == expected
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-next-80b-a3b"]))
    assert recorded(str(tmp_path)) == expected
    assert recorded("org/some-name", profile=str(tmp_path / "config.json")) == expected
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    assert recorded(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("[")
    assert recorded(str(tmp_path)) is None
    assert recorded("\0" * 3) is None
    with pytest.raises(ConfigError, match="no model profile and no file"):
        recorded("x", profile="qwen-99")
