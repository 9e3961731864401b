"""A small engine on real pools whose "model" is a hash: every page and every state is a pure function of the
tokens up to its end.

So whatever the cache restores can be checked byte for byte, however it came there.
"""

from __future__ import annotations

import itertools
import threading
from typing import ClassVar

import numpy as np
import torch
from blake3 import blake3

from tests.controller.told import Told
from tests.integrity import check_controller, no_pin_is_left
from tiercache.controller import ControllerOptions, HybridCacheController, Status
from tiercache.core import HitPolicy, Outcome, PoolName, Tier, as_tokens
from tiercache.errors import PoolFullError, TransferError
from tiercache.geometry import Geometry, Segment, kv_geometry, state_geometry
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Wrapper

P = 4
KV, MAMBA = PoolName.KV, PoolName.MAMBA
IDENTITY = Identity("test", "1", "float32", "float32", "float32", P)
PAGES = kv_geometry([0, 2], kv_heads=2, head_dim=8, dtype="float32", page_size=P)
STATES = state_geometry(
    [(1, "conv", (7, 3), "bfloat16"), (1, "ssm", (40, 32), "float32"), (3, "ssm", (40, 32), "float32")], P
)

FIVE = (
    Geometry(PoolName.DRAFT, P, (Segment(10, "draft", (P, 3), "float32"),)),
    Geometry(
        PoolName.INDEXER,
        P,
        (Segment(10, "index", (P, 5), "bfloat16"), Segment(12, "index", (P, 5), "bfloat16")),
    ),
    state_geometry([(11, "window", (30, 20), "bfloat16")], P, pool=PoolName.SWA),
)
"""Geometries of three more pools, with layers of their own: two of pages, and one of states."""


def content(tokens, segment) -> torch.Tensor:
    """Make the bytes of one segment of the object that ends with `tokens`."""
    seed = np.asarray(tokens, "<u8").tobytes() + f"{segment.layer}/{segment.name}".encode()
    return torch.frombuffer(bytearray(blake3(seed).digest(length=segment.nbytes)), dtype=torch.uint8)


class Engine:
    """Serves prompts through a controller.

    `hybrid` False leaves the states out, `kv` False the pages. `more` are the geometries of further pools.
    With `told`, every check also compares what a subscriber of KV events knows.
    Thread safety: one owner thread.
    """

    opened: ClassVar[list[HybridCacheController]] = []
    """Controllers to close behind a test, or their threads pile up."""

    def __init__(
        self,
        storage=None,
        *,
        pages=16,
        states=8,
        blocks=32,
        hybrid=True,
        kv=True,
        more=(),
        clock=None,
        options=None,
        engine=None,
        threads=None,
        identity=IDENTITY,
        shard=None,
        ranks=None,
        told=False,
        profile=None,
    ):
        chosen = [*([PAGES] if kv else []), *([STATES] if hybrid else []), *more]
        self.paged = {g.pool: g for g in chosen if g.hit_policy is HitPolicy.ALL_PAGES}
        self.attached = {g.pool: g for g in chosen if g.pool not in self.paged}
        self.hybrid, self.kv = bool(self.attached), bool(self.paged)
        self.tensors = {
            g.pool: {
                (s.layer, s.name): (
                    torch.zeros(pages * P, *s.shape[1:], dtype=getattr(torch, s.dtype))
                    if g.pool in self.paged
                    else torch.zeros(states, *s.shape, dtype=getattr(torch, s.dtype))
                )
                for s in g.segments
            }
            for g in chosen
        }
        self.pools = {g.pool: DevicePool.from_tensors(g, self.tensors[g.pool]) for g in chosen}
        self.arena = HostArena(blocks * 4096, 4096)
        extra = {"clock": clock} if clock else {}
        extra |= {"engine": engine} if engine else {}
        extra |= {"threads": threads} if threads else {}
        self.controller = HybridCacheController(
            identity, self.pools, self.arena, storage, shard=shard, ranks=ranks, profile=profile,
            options=options or ControllerOptions(restore_deadline=10.0), **extra,
        )  # fmt: skip
        self.opened.append(self.controller)
        self.metrics = self.controller.metrics
        self.told = Told(self.context) if told else None

    def serve(self, prompt, answer=(), *, check=True, extra=b""):
        """Restore, compute the rest, commit at each checkpoint and the end, release; return the depth."""
        tokens = as_tokens(list(prompt) + list(answer))
        admission = self.admit(
            self.controller.lookup(tokens[: len(prompt)], extra),
            tokens=len(tokens),
            states=5 if self.hybrid else 0,
        )
        try:
            depth = self.restore(admission, tokens)
            restored = depth
            ends = [*admission.checkpoints, len(tokens)]
            for end in dict.fromkeys(ends):
                self.compute(admission, tokens, depth, end)
                depth = end
                states = {}
                if self.hybrid and end % P == 0:
                    states[end] = self.take_state(admission, tokens[:end])
                self.controller.commit(admission, tokens[:end], states)
            if check:
                self.verify(admission, tokens, len(tokens) // P)
        finally:
            self.controller.release(admission)
        return restored

    def admit(self, lookup, **need):
        """An admission; copies of earlier requests, which hold slots for a moment, are waited for."""
        while True:
            try:
                return self.controller.admit(lookup, **need)
            except PoolFullError:
                if not self.controller.tick(0.01):
                    raise

    def restore(self, admission, tokens):
        """Wait until everything of the restored depth is on the device, and check it."""
        while True:
            poll = admission.wait()
            assert poll.status is not Status.PENDING
            try:
                for layer in sorted(
                    {s.layer for pool in self.pools.values() for s in pool.geometry.segments}
                ):
                    admission.wait_layer(layer)
            except TransferError:
                continue  # pending until the load has landed
            self.verify(admission, tokens, poll.depth // P)
            if self.hybrid and poll.depth:
                self.verify_states(admission.restored_states, tokens[: poll.depth])
            return poll.depth

    def compute(self, admission, tokens, start, end):
        """Write what the model computes for full pages of tokens [start, end)."""
        for page in range(start // P, end // P):
            self.fill(admission, page, tokens[: (page + 1) * P])

    def compute_tail(self, admission, tokens):
        """Write the page in which `tokens` end, if it is not full."""
        if len(tokens) % P:
            self.fill(admission, len(tokens) // P, tokens)

    def fill(self, admission, page, tokens):
        for segment, rows in self.rows(admission, page):
            rows.copy_(content(tokens, segment).view(rows.dtype).view(segment.shape))

    def rows(self, admission, page):
        """Segments of all objects of a page, each with its rows in the engine's tensors."""
        for pool, geometry in self.paged.items():
            slot = int(admission.pages[pool][page])
            for segment in geometry.segments:
                yield segment, self.tensors[pool][segment.layer, segment.name][slot * P : (slot + 1) * P]

    def take_state(self, admission, tokens):
        slots = admission.take_states()
        for pool, geometry in self.attached.items():
            for segment in geometry.segments:
                held = self.tensors[pool][segment.layer, segment.name][slots[pool]]
                held.copy_(content(tokens, segment).view(held.dtype).view(segment.shape))
        return slots

    def verify(self, admission, tokens, pages):
        """Every page of the table holds what its tokens say."""
        for page in range(pages):
            self._verify_page(admission, page, tokens[: (page + 1) * P])

    def _verify_page(self, admission, page, tokens):
        for segment, rows in self.rows(admission, page):
            assert torch.equal(as_bytes(rows), content(tokens, segment)), f"{page} {segment.name}"

    def verify_state(self, slot, tokens, pool=MAMBA):
        for segment in self.attached[pool].segments:
            held = self.tensors[pool][segment.layer, segment.name][slot]
            assert torch.equal(as_bytes(held), content(tokens, segment)), (
                f"state of {pool} at {len(tokens)} {segment.layer}/{segment.name}"
            )

    def verify_states(self, slots, tokens):
        assert slots.keys() == self.attached.keys()
        for pool, slot in slots.items():
            self.verify_state(slot, tokens, pool)

    def verify_resumed(self, admission, tokens):
        """A resumed request has every byte that it had, its last page and its live state included."""
        assert admission.depth == len(tokens)
        self.verify(admission, tokens, len(tokens) // P)
        if len(tokens) % P:
            self._verify_page(admission, len(tokens) // P, tokens)
        self.verify_states(admission.live_states, tokens)

    @property
    def context(self):
        """The controller's `ControllerContext`."""
        # private: no public call tells that a step of a race has been taken, or that nothing is left over
        return self.controller._context

    def keep(self, prompt, *tiers):
        """Serve a prompt, wait until storage has everything, and empty these tiers."""
        self.serve(prompt)
        assert self.settle()
        if tiers:
            evict_checked(self, *tiers)

    def settle(self):
        """Wait until nothing is on its way; returns whether everything is in storage."""
        stored = self.controller.flush(20)
        assert not self.context.in_flight.operations
        return stored

    def check(self):
        check_controller(self.controller)
        if self.told:
            self.told.check()

    def restart(self, url, **kwargs):
        """Another process, as far as the cache can tell."""
        self.controller.close()
        return Engine(open_backend(url), hybrid=MAMBA in self.pools, kv=KV in self.pools, **kwargs)


def evict_checked(engine, *tiers):
    """Empty tiers, and check that every slot and block is accounted for."""
    for tier in tiers:
        engine.controller.evict(tier)
    engine.check()


def all_is_free(engine):
    """Everything lands and is evicted; then nobody holds anything."""
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.arena.available == engine.arena.blocks
    assert all(pool.available == pool.capacity for pool in engine.pools.values())
    assert no_pin_is_left(engine.controller)
    assert engine.metrics.value("pinned_bytes") == engine.metrics.value("parked_bytes") == 0


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).flatten()


def prompt(*ids, repeat=P):
    """`repeat` tokens for every id: whole pages by default."""
    return list(itertools.chain.from_iterable([100 * i + n for n in range(repeat)] for i in ids))


class Flaky(Wrapper):
    """A store whose next calls fail as it was told; what a get does not return it scribbles over.

    Its medium outlives a `close`. Thread safety: as `Wrapper`; the plans are lists, whose pops are atomic.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.gets, self.sets = [], []

    def get(self, items):
        outcomes = super().get(items)
        if not (fault := self._next(self.gets)):
            return outcomes
        for item in items:
            for buffer in item.buffers:
                buffer[:] = b"\xee" * len(buffer)
        if fault in (Outcome.MISS, Outcome.CORRUPT):
            self.inner.delete([item.key for item in items])
        return [fault] * len(items)

    def set(self, items):
        fault = self._next(self.sets)
        return [fault] * len(items) if fault else super().set(items)

    @staticmethod
    def _next(plan):
        try:
            fault = plan.pop()
        except IndexError:
            return None
        if fault == "raise":
            raise RuntimeError("this store breaks its contract")
        return fault

    def close(self):
        pass


class Fence:
    """Passed when the test says so, or the engine's thread waits for it."""

    def __init__(self):
        self._passed = threading.Event()
        self.query = self._passed.is_set
        self.open = self._passed.set
        self._owner = threading.current_thread()

    def synchronize(self):
        if threading.current_thread() is self._owner:
            self.open()
        assert self._passed.wait(30)
