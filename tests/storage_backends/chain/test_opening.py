"""Opening of a chain whose tiers may be sick: what refuses the chain, and what only leaves a tier out."""

from __future__ import annotations

import errno
import threading

import pytest
from tiercache_backends.chain import TierChain

from tests.faults import FaultEnv
from tests.storage_backends.chain.hooks import add, chain_of
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import ConfigError, StorageError
from tiercache.storage import open_backend
from tiercache.storage.env import Env
from tiercache.storage.registry import check_backend
from tiercache.testing.objects import fetch, key, payload, put

SIZE = 5000
CALLS = ("listdir", "realpath", "lstat", "open")
"""Calls that look at a disk."""


class SickDisk(FaultEnv):
    """Faults for the paths below one directory; all other calls are made."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def perform(self, name, call, arguments):
        there = arguments and isinstance(arguments[0], str) and arguments[0].startswith(self.path)
        return super().perform(name, call, arguments) if there else call(*arguments)

    def hang_all(self):
        """Let every call hang that looks at the disk, as of a file server that is gone."""
        hang = self.hang("listdir", times=10**9)
        for call in CALLS[1:]:
            self.add(call, hang, times=10**9)
        return hang


def urls_of(path, kind="file", deadline="300ms"):
    """A chain of a tier on a disk that may be sick, above one that is well."""
    return [
        f"{kind}://{path}/sick/s?capacity=32MiB&tier_deadline={deadline}",
        f"file://{path}/well?capacity=32MiB&tier_name=well",
    ]


def opened(path, env, **own) -> TierChain:
    (path / "sick").mkdir(exist_ok=True)
    return chain_of(open_backend(urls_of(path, **own), env=env))


def test_a_second_chain_over_the_same_directories_is_refused_or_waits(tmp_path):
    own = {"kind": "file", "deadline": "10s"}
    first = opened(tmp_path, Env(), **own)
    put(first, key("a"), payload("a", SIZE))
    first.flush()
    for urls in (urls_of(tmp_path, **own), urls_of(tmp_path, **own)[::-1]):
        with pytest.raises(
            StorageError, match=r"no tier can be opened: .*is in use by this process"
        ) as caught:
            open_backend(urls)
        assert "\n" not in str(caught.value)
    shared = urls_of(tmp_path, **own)[1]
    second = chain_of(open_backend(["memory://?capacity=8MiB", shared]))
    assert put(second, key("b"), payload("b", SIZE)) is Outcome.STORED
    with pytest.raises(StorageError, match="'well' lacks 1 objects"):
        second.flush()
    first.close()
    until(lambda: second.tiers[1].is_readable)
    second.flush()
    assert fetch(second, key("a"), SIZE) == payload("a", SIZE)
    second.close()


@pytest.mark.parametrize(("kind", "hangs"), [("file", True), ("lmdb", True), ("file", False)])
def test_a_disk_that_does_not_answer_or_fails_leaves_its_tier_out(tmp_path, kind, hangs):
    env = SickDisk(tmp_path / "sick")
    hang = env.hang_all() if hangs else None
    for call in () if hangs else CALLS:
        env.fail(call, times=10**9, error=errno.ESTALE)
    with opened(tmp_path, env, kind=kind) as chain:
        assert [tier.is_readable for tier in chain.tiers] == [False, True]
        assert put(chain, key("a"), payload("a", SIZE)) is Outcome.STORED
        assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)
        env.clear()
        if hang is not None:
            hang.release()
        until(lambda: chain.tiers[0].is_readable)


def test_disks_that_do_not_answer_are_waited_for_together(tmp_path):
    """Each hang is released when all tiers have reached theirs, so one at a time would never open."""
    disks = [tmp_path / str(n) for n in range(4)]
    reached = threading.Barrier(len(disks))

    class Slow(Env):
        def listdir(self, path):
            reached.wait(60)
            return super().listdir(path)

    urls = [f"file://{disk}?capacity=16MiB&tier_name=t{n}" for n, disk in enumerate(disks)]
    open_backend(urls, env=Slow()).close()


def test_a_disk_that_hangs_during_a_change_refuses_the_change(tmp_path):
    env = SickDisk(tmp_path / "sick")
    (tmp_path / "sick").mkdir()
    sick, well = urls_of(tmp_path)
    with open_backend([well], env=env) as chain:
        hang = env.hang_all()
        with pytest.raises(StorageError, match="'file' cannot be opened, so the chain is as before"):
            add(chain, sick)
        assert [tier.name for tier in chain_of(chain).tiers] == ["well"]
        hang.release()

        def is_added():
            try:
                add(chain, sick)
            except StorageError:  # the opening that hung has not closed what it opened late
                return False
            return True

        until(is_added)


def test_a_mistake_refuses_the_chain_though_another_tier_hangs(tmp_path):
    env = SickDisk(tmp_path / "sick")
    hang = env.hang_all()
    (tmp_path / "well").write_text("")
    with pytest.raises(ConfigError, match=r"tier 'well': .*/well cannot be looked into"):
        opened(tmp_path, env)
    hang.release()


def taken(path):
    path.mkdir()
    (path / "notes").write_text("")


def of_another_kind(path):
    open_backend(f"lmdb://{path}?capacity=16MiB").close()


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda path: path.write_text(""), ConfigError, "cannot be looked into"),
        (lambda path: path.symlink_to(path), ConfigError, "cannot be looked into"),
        (taken, ConfigError, "is not empty and holds no tiercache store"),
        (of_another_kind, StorageError, "holds a store of kind"),
    ],
)
def test_a_mistake_refuses_the_chain_and_opens_nothing(tmp_path, make, error, sentence):
    (tmp_path / "sick").mkdir()
    make(tmp_path / "sick" / "s")
    with pytest.raises(error, match=f"tier 'file': .*{sentence}"):
        opened(tmp_path, Env())
    assert not (tmp_path / "well").exists()


def test_a_directory_without_permission_refuses_the_chain(tmp_path):
    env = SickDisk(tmp_path / "sick")
    env.fail("listdir", error=errno.EACCES)
    with pytest.raises(ConfigError, match="name a directory of this user's"):
        opened(tmp_path, env)


def test_a_plain_store_says_that_its_disk_fails(tmp_path):
    env = FaultEnv()
    env.fail("listdir")
    with pytest.raises(StorageError, match="cannot be looked into now"):
        check_backend(f"file://{tmp_path}/s?capacity=16MiB", env=env)
