"""Five pools at once: pages of three kinds, and states of two."""

import pytest

from tests.controller.harness import FIVE, KV, MAMBA, Engine, P, evict_checked, prompt
from tests.controller.parking import PROMPT, go_on, parked, scribble, verify
from tests.controller.test_interleavings import ask, until
from tests.controller.test_overlap import all_is_free
from tests.examples import slow_after
from tiercache.controller import WRITE_BACK, WRITE_THROUGH, ControllerOptions, ParkedStatus
from tiercache.core import Outcome, PoolName, Tier, as_tokens
from tiercache.storage.base import GetItem
from tiercache.storage.registry import open_backend

DRAFT, INDEXER, SWA = PoolName.DRAFT, PoolName.INDEXER, PoolName.SWA
POOLS = (KV, DRAFT, INDEXER, MAMBA, SWA)
STATE_POOLS = (MAMBA, SWA)
FIRST = [*prompt(1, 2, 3), 5]
LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]


def options(**kwargs):
    return ControllerOptions(restore_deadline=20.0, **{"park_share": 0.9, "piece_bytes": 1, **kwargs})


def five(store=None, **kwargs):
    return Engine(
        store, **{"pages": 16, "states": 8, "blocks": 96, "more": FIVE, "options": options(), **kwargs}
    )


def opened(path):
    return open_backend(f"file://{path}/store?capacity=16MiB")


def empty(engine):
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    scribble(engine)


@pytest.mark.parametrize("write", [WRITE_THROUGH, WRITE_BACK])
def test_all_five_come_back_from_a_store_of_files(tmp_path, write):
    engine = five(opened(tmp_path), options=options(write=write, write_chance=0.0))
    assert engine.serve(LONG) == 0
    assert engine.settle()
    evict_checked(engine, Tier.DEVICE)
    scribble(engine)
    assert engine.serve(LONG) == 6 * P, "from the host"
    empty(engine)
    assert engine.serve(LONG) == 6 * P, "from storage"
    assert engine.metrics.value("restored_objects_total", "storage", "swa") == 1
    assert engine.controller.close()
    engine = five(opened(tmp_path))
    scribble(engine)
    assert engine.serve([*LONG, 8, 9]) == 6 * P, "in another process"
    for pool in POOLS:
        count = 1 if pool in STATE_POOLS else 6
        assert engine.metrics.value("restored_objects_total", "storage", pool) == count
    all_is_free(engine)


@pytest.mark.parametrize("harm", ["delete", "corrupt"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("depth", slow_after(1, [6, 2, 4]))
def test_what_any_one_pool_lacks_leaves_the_depth_below(tmp_path, pool, depth, harm):
    """An object of one pool is gone: the next depth below that is whole is restored, in all pools."""
    engine = five(opened(tmp_path))
    engine.serve(FIRST)
    engine.serve(LONG)
    engine.settle()
    store = engine.context.storage.backend
    there = {e.meta.depth: e for e in store.scan_all() if e.key.pool is pool}
    if depth not in there:  # there are states at the ends of the prompts only
        assert pool in STATE_POOLS
        assert set(there) == {3, 5, 6} or set(there) >= {3, 6}
        return
    entry = there[depth]
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    if harm == "delete":
        store.delete([entry.key])
    else:
        damage(tmp_path, store, entry)
    scribble(engine)
    restored = engine.serve(LONG)
    whole = {d for d in (3, 5, 6) if d < depth or (pool in STATE_POOLS and d != depth)}
    states = {e.meta.depth for e in store.scan_all() if e.key.pool is MAMBA}
    assert restored == max([d for d in whole if d in states], default=0) * P
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    scribble(engine)
    assert engine.serve(LONG) == 6 * P, "what was lost was computed and stored again"
    all_is_free(engine)


def damage(path, store, entry):
    """Change a byte of one object on the medium."""
    buffer = memoryview(bytearray(1 << 20))
    assert store.get([GetItem(entry.key, [buffer], entry.meta.length)]) == [Outcome.HIT]
    begin = bytes(buffer[:64])
    places = [(file, file.read_bytes().find(begin)) for file in path.rglob("*") if file.is_file()]
    [(file, at)] = [(file, at) for file, at in places if at >= 0]
    with file.open("r+b") as medium:
        medium.seek(at)
        medium.write(bytes([begin[0] ^ 1]))


@pytest.mark.parametrize("below", [False, True])
def test_a_parked_request_has_five_pools_too(tmp_path, below):
    engine = five(opened(tmp_path))
    held = parked(engine, commit=False, below=below)
    until(engine, lambda: held.status is (ParkedStatus.STORED if below else ParkedStatus.ON_HOST))
    empty(engine)
    admission = engine.controller.resume(held.to_bytes() if below else held)
    admission.wait()
    assert admission.resumed
    verify(engine, admission)
    go_on(engine, admission)
    all_is_free(engine)


def test_a_fork_shares_pages_and_copies_states_of_all_pools():
    engine = five()
    tokens = as_tokens(PROMPT)
    source = ask(engine, tokens, states=2)
    source.start()
    engine.compute(source, tokens, 0, 3 * P)
    engine.controller.commit(source, tokens, {3 * P: engine.take_state(source, tokens[: 3 * P])})
    engine.compute_tail(source, tokens)
    fork = engine.controller.fork(
        source, states=2, written=len(tokens), live=engine.take_state(source, tokens)
    )
    engine.controller.release(source)
    engine.verify(fork, tokens, 3)
    engine.verify_states(fork.live_states, tokens)
    engine.verify_states(fork.fork_states(), tokens[: 3 * P])
    assert all(len(table) == 4 for table in fork.pages.values())
    engine.controller.release(fork)
    all_is_free(engine)
