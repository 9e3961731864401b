"""Two workers on two hosts share memory that Mooncake pools, or a bucket, whatever is killed or cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.stores import missing
from tests.hosts.three import Three, three_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["mooncake", "s3"])
def all_three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    if reason := missing(request.param):
        pytest.skip(reason)
    with three_hosts(request.param, tmp_path_factory.mktemp("hosts")) as three:
        yield three


@pytest.fixture
def three(all_three: Three) -> Iterator[Three]:
    yield all_three
    all_three.heal()


def test_a_worker_that_is_cut_off_computes_alone(three: Three) -> None:
    prompt = three.shared()
    three.hosts.silence(three.hosts[1])
    assert not three.serve(1, prompt).restored
    assert three.serve(0, prompt).hit, "the other host is not concerned"
    three.hosts.heal(three.hosts[1])
    three.comes_back(1, prompt)


def test_hits_come_back_after_a_kill(three: Three) -> None:
    prompt, before = three.shared(), three.shared()
    three.store.kill(three.store.parts[0])
    assert not three.serve(0, prompt).restored
    assert not three.serve(1, prompt).restored
    three.store.start(three.store.parts[0])
    three.comes_back(0, prompt)
    three.comes_back(1, prompt)
    assert three.serve(0, before).hit is three.store.keeps
