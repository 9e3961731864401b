"""Settings of chains and tiers that are wrong: each gets one sentence, and opens nothing."""

from __future__ import annotations

import threading

import pytest

from tiercache.errors import ConfigError
from tiercache.storage import open_backend


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
        (["memory://", "memory://?tier_write=write_back"], "'memory' above it has no capacity and evicts"),
        (["memory://?capacity=0", "memory://?tier_write=write_back"], "'memory' above it has no capacity"),
        (
            ["memory://?capacity=8MiB&tier_read_only=yes", "memory://?tier_write=kv:write_back"],
            "'memory' above it is read-only and evicts",
        ),
        (["s3://bucket/a", "memory://?tier_write=write_back"], "'s3' above it cannot say what it"),
        (["memory://", "memory://?tier_promote=now"], "setting 'tier_promote': 'now'"),
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
