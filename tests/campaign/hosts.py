"""Hosts that are cut off at random, with processes that are killed at random: workers, and what they share.

A history draws its steps by a seed: requests of both workers, partitions of every host, slow and lossy lines,
kills and restarts of each process, also in the middle of a request. Every answer is audited. At the end
everything heals, and then each worker restores what the other writes, and, where the store keeps its
contents, all that was stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.model import Verdict
from tests.campaign.report import Row, Run
from tests.hosts.network import GUARD
from tests.hosts.rig import DEADLINE, PAGE_SIZE, Answer, Desk
from tests.hosts.stores import KINDS, has_own_tier, missing, needs_store
from tests.hosts.three import Three, three_hosts

STEPS = 40
"""Steps of one history."""
LINES = ((0.0, 0.0), (0.001, 0.0), (0.005, 0.0), (0.001, 0.01), (0.0, 0.05))
"""Delays in seconds each way, and probabilities of a loss."""
PROMPTS = 6
"""Prompts that are asked again and again."""
SLACK = 30.0
"""Seconds that a busy machine may take to compute a small prompt and its answer."""


def campaign(run: Run) -> Iterator[Row]:
    """Histories of each store."""
    for name in KINDS:
        row = Row("hosts", name, skipped=missing(name))
        yield row if row.skipped else run.row(row, partial(history, row, name))


def history(row: Row, kind: str, seed: int, base: Path) -> Verdict:
    """Live through one history."""
    with three_hosts(kind, base) as three:
        life = Life(three, kind, seed)
        for _ in range(STEPS):
            life.step()
        life.end()
    row.count({"requests": len(life.desk.rows), "hits": life.hits, **life.counts})
    return life.verdict


class Life:
    """The hosts, and what is known of what their store must have."""

    def __init__(self, three: Three, kind: str, seed: int) -> None:
        self._kind = kind
        self._hosts, self._store, self._workers = three.hosts, three.store, three.workers
        self._random, self.desk, self.verdict = Random(seed), Desk(seed), Verdict()
        self.counts = {"kills": 0, "partitions": 0}
        self._prompts = [self.desk.prompt() for _ in range(PROMPTS)]
        self._stored: dict[int, int] = {}
        """Numbers of prompts that were computed, and stored as a flush said, while nothing was cut off or
        killed, and of the workers that did it.
        """
        self._asked: list[set[int]] = [set(), set()]
        """Numbers of the prompts that each worker has computed since its last flush."""
        self._cut: set[int] = set()
        self._dead: set[str] = set()

    @property
    def hits(self) -> int:
        """Number of answers with something from storage."""
        return sum(row.hit for row in self.desk.rows)

    def step(self) -> None:
        """Do one thing, most often a request."""
        acts: list[tuple[Callable[[], None], int]] = [
            (self._request, 12), (self._flush, 4), (self._partition, 2), (self._heal, 3), (self._line, 1),
            (self._kill_part, 1), (self._start_parts, 2), (self._kill_worker, 1), (self._cut_in_between, 2),
        ]  # fmt: skip
        [act] = self._random.choices([act for act, _ in acts], [weight for _, weight in acts])
        act()

    def end(self) -> None:
        """Heal everything; hits must come back by themselves."""
        self._heal()
        self._start_parts()
        self._hosts.shape()
        fresh = self.desk.prompt()
        self._hit(0, fresh)
        self._hit(1, fresh)
        for prompt, worker in self._stored.items():
            # Below a file tier that keeps objects, copies to the shared store may come later than a flush.
            asked = worker if has_own_tier(self._kind) else prompt % 2
            if self._ask(asked, self._prompts[prompt]).hit:
                self.verdict.present += 1
            else:
                self.verdict.lost += 1
                self.verdict.notes.append("a prompt that was stored is gone")

    def _hit(self, number: int, prompt: list[int]) -> None:
        """Ask until a prompt comes from storage; the worker stores what it had to compute."""
        end = time.monotonic() + GUARD
        while not self._ask(number, prompt).hit:
            if time.monotonic() > end:
                self.verdict.lost += 1
                self.verdict.notes.append("a prompt does not come back")
                return
            self._workers[number].call("flush")
            time.sleep(0.2)

    def _request(self) -> None:
        number, prompt = self._random.randrange(2), self._random.randrange(PROMPTS)
        row = self._ask(number, self._prompts[prompt], cold=self._random.random() < 0.7)
        if not row.restored:
            self._asked[number].add(prompt)

    def _flush(self) -> None:
        number = self._random.randrange(2)
        if self._workers[number].call("flush") and not self._cut and not self._dead:
            self._stored |= dict.fromkeys(self._asked[number], number)
        self._asked[number].clear()

    def _partition(self) -> None:
        number = self._random.randrange(3)
        self._random.choice((self._hosts.silence, self._hosts.unplug))(self._hosts[number])
        self._cut.add(number)
        self.counts["partitions"] += 1

    def _heal(self) -> None:
        for number in range(3):
            self._hosts.heal(self._hosts[number])
        self._cut.clear()

    def _line(self) -> None:
        self._hosts.shape(*self._random.choice(LINES))

    def _kill_part(self) -> None:
        part = self._random.choice(self._store.parts)
        if part not in self._dead:
            self._store.kill(part)
            self._dead.add(part)
            self.counts["kills"] += 1
            if not self._store.keeps:
                self._stored.clear()

    def _start_parts(self) -> None:
        for part in self._store.parts:
            if part in self._dead:
                self._store.start(part)
        self._dead.clear()

    def _kill_worker(self) -> None:
        """Kill a worker in the middle of a request whose prompt nobody asks again.

        What it had not flushed may be lost, and the audit does not know the run that ended.
        """
        number = self._random.randrange(2)
        self.desk.begin(self._workers[number], self.desk.prompt(8 * PAGE_SIZE))
        time.sleep(self._random.random())
        self._workers[number].kill()
        if is_needed := needs_store(self._kind):
            self._heal()
            self._start_parts()
        self._workers[number].start()
        if is_needed:
            self._workers[number].wait()
        self._asked[number].clear()
        self.counts["kills"] += 1

    def _cut_in_between(self) -> None:
        """Cut off a host while a worker is at work."""
        number, prompt = self._random.randrange(2), self._random.randrange(PROMPTS)
        self.desk.begin(self._workers[number], self._prompts[prompt])
        time.sleep(self._random.random() / 5)
        self._partition()
        self._judge(number)
        self._heal()

    def _ask(self, number: int, prompt: list[int], cold: bool = True) -> Answer:
        self.desk.begin(self._workers[number], prompt, cold=cold)
        return self._judge(number)

    def _judge(self, number: int) -> Answer:
        row = self.desk.end(self._workers[number])
        if not row.right:
            self.verdict.wrong += 1
            self.verdict.notes.append(f"wrong: {row}")
        if row.seconds > DEADLINE + SLACK:
            self._fail(f"an answer took {row.seconds:.1f} s")
        return row

    def _fail(self, note: str) -> None:
        self.verdict.failed += 1
        self.verdict.notes.append(note)
