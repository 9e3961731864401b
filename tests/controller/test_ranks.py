"""Controllers of several ranks over one store: all restore the same depth, or none does."""

import json
import subprocess
import sys

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, P
from tests.controller.ranks_rig import PROMPT, Crew, Ranked, ThreadedGroup, threaded
from tests.examples import slow_after
from tiercache.controller import ControllerOptions, Status
from tiercache.core import Reason, Tier
from tiercache.errors import AdmissionError, InputError, PoolFullError, RankError
from tiercache.keys import Shard, layout_digest


class Stores:
    """One medium, and the view of it that each rank has."""

    def __init__(self, size):
        self.medium = MemoryBackend()
        self.ranks = [Ranked(self.medium) for _ in range(size)]

    def __call__(self, rank):
        return self.ranks[rank]

    def keys(self, crew, rank, pool):
        """Keys of one rank's shard of a pool, by depth in pages."""
        geometry = crew.engines[rank].pools[pool].geometry
        layout = layout_digest(pool, geometry.fingerprint, Shard(rank, crew.size))
        found = {e.meta.depth: e.key for e in self.medium.scan_all() if e.key.layout == layout}
        return dict(sorted(found.items()))

    def lose(self, crew, rank, pool, depth, *, hidden=False):
        key = self.keys(crew, rank, pool)[depth]
        self.medium.delete([key])
        if hidden:
            self.ranks[rank].lost.add(key)


@pytest.fixture
def crew():
    crews = []

    def make(size=2, store=None, **settings):
        crews.append(Crew(size, store or Stores(size), **settings))
        return crews[-1]

    yield make
    for one in crews:
        for engine in one.engines:
            if isinstance(engine.context.storage.backend, Ranked):
                engine.context.storage.backend.gate.set()
        one.close()


def filled(crew, size=2, **settings):
    """Ranks that have PROMPT in storage only, with states at some depths; and the stores."""
    stores = Stores(size)
    ranks = crew(size, stores, **settings)
    for pages in (3, 5, 6):
        ranks.serve(PROMPT[: pages * P], [1])
        assert all(ranks.settle()), "what waits to be written may be evicted by the next request"
    ranks.evict(Tier.DEVICE, Tier.HOST)
    depths = [*stores.keys(ranks, 0, MAMBA)]
    assert depths == [2, 3, 4, 5, 6]
    return ranks, stores


@pytest.mark.parametrize(("size", "sharded"), [(2, True), (4, False)])
def test_all_ranks_restore_the_same_from_every_tier(crew, size, sharded):
    stores = Stores(size)
    ranks = crew(size, stores, sharded=sharded)
    assert ranks.serve(PROMPT, [1]) == [0]
    assert ranks.settle() == [True] * size
    kinds = [entry.key.pool for entry in stores.medium.scan_all()]
    assert kinds.count(KV) == 6 * (size if sharded else 1)  # replicated pages are written by one rank
    for tiers in ((), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
        ranks.evict(*tiers)
        assert ranks.serve(PROMPT, [1]) == [5]
    assert ranks.engines[-1].metrics.total("restore_failures_total") == 0
    other = crew(2 * size, lambda _: Ranked(stores.medium), sharded=sharded)
    assert other.serve(PROMPT, [1]) == [0]  # nothing of it is for another number of ranks


def test_replicated_pages_are_written_by_one_rank_and_believed_only_when_they_are_there(crew):
    stores = Stores(2)
    ranks = crew(2, stores, sharded=False, options=ControllerOptions(write_retries=0))
    ranks.serve(PROMPT[: 3 * P], [1])
    for _ in range(3):  # the other rank may ask before the first has written
        ranks.settle()
        ranks.serve(PROMPT[: 3 * P], [1])
    assert all(ranks.settle())
    assert [store.written for store in stores.ranks] == [{KV, MAMBA}, {MAMBA}]
    stores.ranks[0].refuses = True
    ranks.serve(PROMPT, [1])
    assert ranks.settle() == [False, False]
    assert max(stores.keys(ranks, 1, MAMBA)) == 3  # no state goes before its pages


@pytest.mark.parametrize("hidden", [False, True])
def test_holes_in_the_stores_of_ranks_lead_to_the_deepest_depth_that_all_have(crew, hidden):
    ranks, stores = filled(crew, 4)
    stores.lose(ranks, 3, MAMBA, 5, hidden=hidden)
    stores.lose(ranks, 1, MAMBA, 4, hidden=hidden)
    assert ranks.serve(PROMPT, [1]) == [3]
    ranks.settle()
    ranks.evict(Tier.DEVICE, Tier.HOST)
    stores.lose(ranks, 2, KV, 1, hidden=hidden)
    assert ranks.serve(PROMPT, [1]) == [0]
    assert ranks.engines[0].metrics.total("lookups_total", reason="ranks") > 0


def test_parked_requests_are_for_a_single_rank(crew):
    ranks, _ = filled(crew)
    leader, _ = (engine.controller for engine in ranks.engines)
    admissions = ranks.admit(states=1)
    with pytest.raises(AdmissionError, match="park is not possible in a group of ranks"):
        leader.park(admissions[0], PROMPT, ttl=1.0)
    with pytest.raises(AdmissionError, match="resume is not possible in a group of ranks"):
        leader.resume(b"ticket")
    ranks.release(admissions)


def test_a_request_for_which_one_rank_has_no_slots_is_released_on_all(crew):
    ranks, _ = filled(crew, pages=[16, 8])
    leader, small = (engine.controller for engine in ranks.engines)
    held = ranks.admit([9] * P, tokens=4 * P)
    [each.wait() for each in held]
    waiting = leader.admit(leader.lookup(PROMPT))
    with pytest.raises(PoolFullError):
        small.admit(small.lookup(PROMPT))
    with pytest.raises(PoolFullError, match="another rank has too few slots"):
        waiting.wait()
    ranks.release(held)
    leader.release(waiting)
    assert ranks.serve(PROMPT, [1]) == [5]


def test_a_follower_begins_at_the_leaders_depth_only(crew):
    ranks, _ = filled(crew)
    first, second = ranks.admit(states=1)
    with pytest.raises(InputError, match="no whole number of pages"):
        second.follow(P + 1)
    with pytest.raises(AdmissionError, match="single rank"):
        super(type(second), second).follow(P)
    while first.poll().status is Status.PENDING:
        second.poll()
    assert first.depth == 5 * P
    assert second.poll().status in (Status.PENDING, Status.READY)
    with pytest.raises(RankError, match=r"(holds 5|at a depth of 20 tokens)"):
        second.follow(4 * P)
    assert second.follow(5 * P).depth == 5 * P
    ranks.release([first, second])


def test_a_follower_that_has_given_up_says_so(crew):
    ranks, _ = filled(crew, deadline=0.3)
    other = ranks.engines[1].controller
    admission = other.admit(other.lookup(PROMPT))
    assert admission.wait().reason is Reason.TIMEOUT
    with pytest.raises(RankError, match="before its deadline"):
        admission.follow(5 * P)
    assert admission.follow(0).depth == 0
    other.release(admission)
    leader = ranks.engines[0].controller
    leader.release(leader.admit(leader.lookup(PROMPT)))


def test_start_ends_the_wait_for_storage_on_all(crew):
    ranks, stores = filled(crew)
    stores.ranks[0].gate.clear()
    admissions = ranks.admit()
    for each in admissions:
        each.start()
    assert [each.wait().depth for each in admissions] == [0, 0]
    ranks.release(admissions)
    stores.ranks[0].gate.set()


def test_a_group_of_one_costs_nothing_and_an_impossible_one_is_refused():
    [group] = threaded(1)
    engine = Engine(MemoryBackend(), ranks=group)
    assert engine.controller._session is None  # private: nothing else shows that there is no session
    assert engine.serve(PROMPT) == 0
    for size, rank, sentence in ((0, 0, "a group of 0 ranks"), (2, 2, "rank 2 is outside the group of 2")):
        with pytest.raises(InputError, match=sentence):
            Engine(MemoryBackend(), ranks=ThreadedGroup(rank, size, []))


# -- ranks as processes, over gloo on loopback


def run(size, folder):
    """Run all ranks to their end."""

    def start(rank):
        command = [sys.executable, "-m", "tests.controller.ranks_model", str(rank), str(size), str(folder)]
        with (folder / f"rank-{rank}.err").open("a") as error:
            return subprocess.Popen(command, stdout=error, stderr=error)

    processes = [start(rank) for rank in range(size)]
    try:
        for rank, process in enumerate(processes):
            assert process.wait(90) == 0, (folder / f"rank-{rank}.err").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", slow_after(1, [2, 4]))
def test_ranks_of_one_model_restore_the_same_bits_whatever_one_of_them_lacks(size, tmp_path):
    logs = run(size, tmp_path)
    others = []  # depths of the two pairs of ranks; who comes second finds what the first has written
    for log in logs:
        served = {}
        for entry in log:
            if "depths" in entry:
                served.setdefault(entry["step"], []).append(entry["depths"])
                assert entry["same"], entry
        assert served["cold"] == [[0], [3], [5]]
        assert served["warm"] == [[5]] * 3
        assert served["holes"] == [[3]]  # depths 4 and 5 were lost
        others += served.get("other size", [])
        assert {"step": "closed", "quiet": True} in log
    first, second = sorted(others)[:2], sorted(others)[2:]
    assert size == 2 or (first == [[0], [0]] and second[0] == second[1])
