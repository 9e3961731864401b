"""Settings of chains and tiers that are wrong: each gets one sentence, and opens nothing."""

from __future__ import annotations

import threading

import pytest
from tiercache_backends.chain.settings import parse_tier

from tiercache.config.urls import section_of
from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.storage import open_backend

HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 5000
BLOCK = 4096


def test_a_wrong_setting_leaves_no_other_tier_open(tmp_path):
    url = f"file://{tmp_path}/a?capacity=16MiB"
    with pytest.raises(ConfigError):
        open_backend([url, "memory://?bogus=1"])
    open_backend(url).close()


FILES = ["file:///tmp/a?capacity=16MiB", "file:///tmp/b?capacity=16MiB"]


@pytest.mark.parametrize(
    ("tiers", "sentence"),
    [
        ([], "give one or more"),
        (["memory://"] * 9, "9 tiers are more than the 8"),
        ([*FILES, "file:///tmp/../tmp/a?capacity=32MiB"], "tiers 'file' and 'file-3' are both at /tmp/a"),
        (["memory://?tier_name=x", "memory://?tier_name=x"], "two tiers are named 'x'"),
        (["memory://?tier_name=a/b"], "is no name"),
        (
            ["memory://?tier_speed=9"],
            "has no setting 'tier_speed'; it has tier_deadline, tier_in_flight, tier_name,",
        ),
        (["memory://", "memory://?tier_write=later"], "'later' is not possible; use write_through,"),
        (["memory://", "memory://?tier_write=kv:write_back,kv:write_back"], "is not possible"),
        (["memory://?tier_write=write_back"], "is the first, so nothing can be written back to it"),
        (
            ["memory://", "memory://?tier_write=write_back&tier_read_only=yes"],
            "is read-only, so nothing can be written through or back to it",
        ),
        (["memory://", "memory://?tier_write_per_day=0"], "a budget of 0 bytes a day allows no write"),
        ([{"type": "chain", "tiers": ["memory://"]}], "a tier cannot be a chain itself"),
        ([{"path": "/tmp/a"}], "has no type"),
        ([7], "7 is no tier"),
        (["memory://?capacity=much"], "is not a size"),
    ],
)
def test_a_wrong_chain_is_refused_with_one_sentence(tiers, sentence):
    with pytest.raises(ConfigError) as caught:
        open_backend(tiers)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_tier_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(ConfigError, match="'nothing' is unknown"):
        open_backend(["memory://", "nothing://"])
    assert threading.active_count() == before


EVERY = (
    "lmdb:///d?tier_name=d&tier_write=write_back&tier_write_after=3&tier_promote=never&tier_deadline=1s"
    "&tier_threads=9&tier_in_flight=64MiB&tier_write_per_day=5GiB"
)
"""Every setting of a tier, but `tier_read_only`, which excludes others."""


@pytest.mark.parametrize(
    "url",
    [
        "memory://?capacity=8GiB&tier_name=memory",
        "file:///data/a%20b%23?capacity=2TiB&tier_name=ssd&tier_promote=never",
        "grpc://host:7070?timeout=1s&tls=true&tier_name=far&tier_read_only=true&tier_deadline=1500ms",
        EVERY,
        "lmdb:///d?tier_name=d&tier_write=kv:write_back,mamba:write_through",
        "lmdb:///d?tier_name=d&tier_write=kv:write_through,write_through_selective",
    ],
)
def test_the_url_of_a_tier_opens_the_same_tier_again(url):
    assert parse_tier(url).url == url
    section = {**section_of(url), "tier_name": "other"}
    assert parse_tier(parse_tier(section).url) == parse_tier(section)


def test_the_url_of_a_tier_has_every_setting():
    with pytest.raises(ConfigError) as caught:
        parse_tier("memory://?tier_speed=9")
    known = set(str(caught.value).partition("it has ")[2].split(", "))
    assert known == {name for name in section_of(EVERY) if name.startswith("tier_")} | {"tier_read_only"}
