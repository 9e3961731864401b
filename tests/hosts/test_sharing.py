"""Two workers on two hosts share a store on a third, whatever is killed or cut off."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts.rig import PAGE_SIZE
from tests.hosts.stores import missing
from tests.hosts.three import Three, three_hosts

pytestmark = pytest.mark.slow

of_a_daemon = pytest.mark.parametrize("all_three", ["daemon"], indirect=True)


@pytest.fixture(scope="module", params=["daemon", "mooncake", "s3"])
def all_three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    if reason := missing(request.param):
        pytest.skip(reason)
    with three_hosts(request.param, tmp_path_factory.mktemp("hosts")) as three:
        yield three


@pytest.fixture
def three(all_three: Three) -> Iterator[Three]:
    yield all_three
    all_three.heal()


@of_a_daemon
@pytest.mark.parametrize("line", [(0.0, 0.0), (0.005, 0.0), (0.001, 0.01)], ids=str)
def test_what_one_worker_wrote_the_other_restores(three: Three, line: tuple[float, float]) -> None:
    three.hosts.shape(*line)
    prompt = three.desk.prompt()
    assert not three.serve(0, prompt).restored
    assert three.workers[0].call("flush")
    before = three.hosts[1].traffic()[0]
    row = three.comes_back(1, prompt)
    assert row.restored == len(prompt) // PAGE_SIZE * PAGE_SIZE
    assert three.hosts[1].traffic()[0] - before > row.bytes > 1 << 18


@pytest.mark.parametrize("how", ["silence", "unplug"])
def test_a_worker_that_is_cut_off_computes_alone(three: Three, how: str) -> None:
    prompt = three.shared()
    getattr(three.hosts, how)(three.hosts[1])
    assert not three.serve(1, prompt).restored
    assert three.serve(0, prompt).hit, "the other host is not concerned"
    assert not three.serve(1, prompt).restored
    three.hosts.heal(three.hosts[1])
    three.comes_back(1, prompt)


@of_a_daemon
def test_without_the_daemons_host_both_compute(three: Three) -> None:
    prompt, other = three.shared(), three.desk.prompt()
    three.hosts.silence(three.hosts[2])
    assert not three.serve(0, prompt).restored
    assert not three.serve(1, prompt).restored
    three.serve(0, other)
    three.hosts.heal(three.hosts[2])
    three.comes_back(0, prompt)
    three.comes_back(1, prompt)


@of_a_daemon
def test_a_cut_in_the_middle_of_a_restore(three: Three) -> None:
    prompt = three.shared(three.desk.prompt(10 * PAGE_SIZE + 20))
    three.hosts.shape(0.05)
    three.comes_back(1, prompt)
    three.workers[1].call("empty")
    before = three.hosts[1].traffic()[0]
    three.desk.begin(three.workers[1], prompt)
    while three.hosts[1].traffic()[0] - before < 1 << 16:
        time.sleep(0.001)
    three.hosts.silence(three.hosts[2])
    assert not three.desk.end(three.workers[1]).hit
    three.hosts.heal(three.hosts[2])
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


@of_a_daemon
def test_a_worker_is_killed_in_the_middle_of_a_request(three: Three) -> None:
    prompt = three.shared()
    three.desk.begin(three.workers[0], three.desk.prompt(640))
    time.sleep(0.2)
    three.workers[0].kill()
    assert three.serve(1, prompt).hit
    three.workers[0].start()
    three.comes_back(0, prompt)
