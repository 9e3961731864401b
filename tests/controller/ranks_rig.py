"""Groups of ranks in one process: messages that a test delivers itself, or threads that deliver them."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.controller.harness import KV, MAMBA, Engine, P, prompt
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.ranks.base import RankFacts
from tiercache.controller.ranks.session import RankSession
from tiercache.core import Outcome, as_tokens
from tiercache.errors import TransferError
from tiercache.keys import Shard
from tiercache.storage.wrappers import Wrapper


def facts(size, **changes):
    pools = {"kv": (Shard(), b"pages"), "mamba": (Shard(), b"states")}
    return RankFacts(**{"size": size, "page_size": 4, "namespace": b"n", "pools": pools} | changes)


class Post:
    """Messages under way between ranks; the test delivers them one by one."""

    def __init__(self, size):
        self.mail = []
        self.groups = [PostedGroup(self, rank, size) for rank in range(size)]
        self.dead = set()

    def deliver(self, index=0):
        to, message = self.mail.pop(index)
        if to not in self.dead:
            self.groups[to].deliver(message)

    def deliver_all(self):
        while self.mail:
            self.deliver()


class PostedGroup:
    def __init__(self, post, rank, size):
        self.post, self.rank, self.size = post, rank, size

    def open(self, deliver):
        self.deliver = deliver

    def send(self, to, message):
        if self.rank not in self.post.dead:
            self.post.mail.append((to, message))

    def close(self):
        pass


def joined(post, given=None):
    """The sessions of all ranks, behind their handshake."""
    size = len(post.groups)
    sessions = [RankSession(group, given[group.rank] if given else facts(size)) for group in post.groups]
    greet(post, sessions)
    return sessions


def greet(post, sessions):
    """Go through the handshake of some sessions."""
    while not all([*map(RankSession.greet, sessions)]):
        post.deliver_all()


class ThreadedGroup:
    """Delivers on a thread of its own, each message `delay` seconds after it was sent."""

    def __init__(self, rank, size, groups):
        self.rank, self.size, self.groups = rank, size, groups
        self.delay = 0.0
        self.queue = queue.SimpleQueue()
        self.thread = None

    def open(self, deliver):
        self.deliver = deliver
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def send(self, to, message):
        self.groups[to].queue.put((time.monotonic() + self.delay, message))

    def close(self):
        self.queue.put(None)

    def _work(self):
        while (entry := self.queue.get()) is not None:
            time.sleep(max(0.0, entry[0] - time.monotonic()))
            self.deliver(entry[1])


def threaded(size):
    groups = []
    groups += [ThreadedGroup(rank, size, groups) for rank in range(size)]
    return groups


PROMPT = prompt(*range(1, 7))

PATIENCE = 60.0
"""Seconds that one rank waits for another: more than both deadlines of a request, 10 and 20 s, together."""


class Word:
    """The broadcast of the leader's engine to those of the others, which an engine has anyway."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.said = None

    def __call__(self, rank, *values):
        if rank == 0:
            self.said = values
        self.barrier.wait(PATIENCE)
        said = self.said
        self.barrier.wait(PATIENCE)
        return said


def serve(engine, rank, word, prompt, answer=()):
    """Serve a prompt on one rank in lock step with the others; return its depths, one for each attempt.

    An engine calls this way: the leader's `poll` begins the request on all ranks, at the leader's depth, and
    nothing is committed before the leader's `confirmed`.
    """
    tokens = as_tokens([*prompt, *answer])
    lookup = engine.controller.lookup(tokens[: len(prompt)])
    admission = engine.admit(lookup, tokens=len(tokens), states=5)
    depths = []
    try:
        while True:
            is_pending = True
            while is_pending:
                poll = admission.poll()
                is_pending, depth, attempt = word(
                    rank, poll.status is Status.PENDING, poll.depth, admission.attempt
                )
            depths.append(depth)
            try:
                if rank:
                    poll = admission.follow(depth, attempt)
                while poll.status is Status.PENDING:
                    poll = admission.wait()
                if admission.attempt != attempt:
                    raise TransferError("this attempt is over")
                assert poll.depth == depth
                for layer in range(engine.layers):
                    admission.wait_layer(layer)
                engine.resume(admission, tokens, depth)
            except TransferError:
                pass  # this rank goes on in step with the others; nobody uses what it computes
            is_confirmed = is_again = False
            while not (is_confirmed or is_again):
                poll = admission.poll()
                is_again = poll.status is Status.PENDING or admission.attempt != attempt
                is_confirmed, is_again = word(rank, admission.confirmed and not is_again, is_again)
            if is_confirmed:
                break
        ends = word(rank, *admission.checkpoints, len(tokens))
        for end in ends:
            engine.compute(admission, tokens, depth, end)
            depth = end
            states = {end: engine.take_state(admission, tokens[:end])} if end % P == 0 else {}
            engine.controller.commit(admission, tokens[:end], states)
        engine.end(admission, tokens)
    finally:
        engine.controller.release(admission)
    return depths


class RankEngine(Engine):
    """Engine of one rank, which checks what it restores."""

    layers = 4

    def resume(self, admission, tokens, depth):
        self.verify(admission, tokens, depth // P)
        if depth:
            self.verify_state(admission.restored_states[MAMBA], tokens[:depth])

    def end(self, admission, tokens):
        self.verify(admission, tokens, len(tokens) // P)


class Crew:
    """Engines of all ranks over one store, each with its own thread."""

    def __init__(self, size, store, *, sharded=True, deadline=10.0, options=None, **settings):
        """Make the engines. States are sharded; KV as well if `sharded`, else replicated."""
        self.size, self.word, self.groups = size, Word(size), threaded(size)
        self.threads = [ThreadPoolExecutor(1) for _ in range(size)]
        options = options or ControllerOptions(restore_deadline=deadline, join_deadline=20.0)

        def make(rank):
            part = Shard(rank, size)
            shard = {MAMBA: part} | ({KV: part} if sharded else {})
            settings_of = {name: each[rank] for name, each in settings.items()}
            return RankEngine(
                store(rank), ranks=self.groups[rank], shard=shard, options=options, **settings_of
            )

        self.engines = self.on_all(make)

    def on_all(self, call):
        """Call something with each rank on its thread, all at once; return the results."""
        return [
            future.result(2 * PATIENCE) for future in [t.submit(call, r) for r, t in enumerate(self.threads)]
        ]

    def serve(self, prompt, answer=()):
        """Serve a prompt on all ranks; return the depths in pages, which are the same on all."""
        depths = self.on_all(lambda rank: serve(self.engines[rank], rank, self.word, prompt, answer))
        assert all(each == depths[0] for each in depths), depths
        return [depth // P for depth in depths[0]]

    def admit(self, prompt=PROMPT, **need):
        """Admit a prompt on all ranks, from this thread; nobody waits."""
        return [e.controller.admit(e.controller.lookup(prompt), **need) for e in self.engines]

    def release(self, admissions):
        for engine, admission in zip(self.engines, admissions, strict=True):
            engine.controller.release(admission)

    def evict(self, *tiers):
        for tier in tiers:
            self.on_all(lambda rank, tier=tier: self.engines[rank].controller.evict(tier))

    def settle(self):
        return self.on_all(lambda rank: self.engines[rank].settle())

    def close(self):
        self.on_all(lambda rank: (self.engines[rank].check(), self.engines[rank].controller.close()))
        for thread in self.threads:
            thread.shutdown()


class Ranked(Wrapper):
    """One rank's view of a store: what `lost` names is reported as there, and then cannot be read.

    Gets wait while `gate` is shut, and nothing is taken while it `refuses`. Unless `is_owned`, the store
    outlives a `close`.
    """

    def __init__(self, inner, *, is_owned=False):
        super().__init__(inner)
        self.lost, self.is_owned = set(), is_owned
        self.gate = threading.Event()
        self.gate.set()
        self.written, self.refuses = set(), False

    def exists(self, keys):
        return [key in self.lost or there for key, there in zip(keys, super().exists(keys), strict=True)]

    def get(self, items):
        assert self.gate.wait(30)
        return super().get(items)

    def set(self, items):
        if self.refuses:
            return [Outcome.THROTTLED] * len(items)
        self.written |= {item.key.pool for item in items}
        return super().set(items)

    def close(self):
        if self.is_owned:
            super().close()
