"""Two workers on two hosts share memory that Mooncake pools, whatever is killed or cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.stores import missing
from tests.hosts.three import Three, three_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def all_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    if reason := missing("mooncake"):
        pytest.skip(reason)
    with three_hosts("mooncake", tmp_path_factory.mktemp("hosts")) as three:
        yield three


@pytest.fixture
def three(all_three: Three) -> Iterator[Three]:
    yield all_three
    all_three.heal()


def test_what_one_worker_wrote_the_other_restores_over_a_lossy_line(three: Three) -> None:
    three.hosts.shape(0.001, 0.01)
    prompt = three.desk.prompt()
    assert not three.serve(0, prompt).restored
    assert three.workers[0].call("flush")
    before = three.hosts[1].traffic()[0]
    row = three.comes_back(1, prompt)
    assert three.hosts[1].traffic()[0] - before > row.bytes > 1 << 18


def test_a_worker_that_is_cut_off_computes_alone(three: Three) -> None:
    prompt = three.shared()
    three.hosts.silence(three.hosts[1])
    assert not three.serve(1, prompt).restored
    assert three.serve(0, prompt).hit, "the other host is not concerned"
    three.hosts.heal(three.hosts[1])
    three.comes_back(1, prompt)


@pytest.mark.parametrize("part", ["master", "provider"])
def test_hits_come_back_after_a_kill_although_the_pool_is_empty(three: Three, part: str) -> None:
    prompt = three.shared()
    three.store.kill(part)
    assert not three.serve(0, prompt).restored
    assert not three.serve(1, prompt).restored
    three.store.start(part)
    three.comes_back(0, prompt)
    three.comes_back(1, prompt)
