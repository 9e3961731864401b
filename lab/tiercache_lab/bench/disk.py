"""A run of `bench disk`, which prepares the disk and the page cache for each case and compares the calls.

Each case compares several ways to move the same batch. A way is a `Side`: the store, or raw system calls.
Sizes of objects are measured one after the other. The directories of a size are removed before the next size
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tiercache.core import ObjectKey
from tiercache.errors import StorageError
from tiercache_lab.bench.baselines import DIRECT_THREADS, PIECE, RawFile, pieces
from tiercache_lab.bench.machine import Machine, warm
from tiercache_lab.bench.plan import STEADY_BATCHES, TINY, Case, Plan
from tiercache_lab.bench.rows import Row, size_text, speed
from tiercache_lab.bench.subject import Buffers, Subject, batch_keys
from tiercache_lab.bench.timing import Crew, Side, medians

STORE: Final = "store"
"""Name of the side that calls the store."""
_DIRECT: Final = f"O_DIRECT x {DIRECT_THREADS}"
"""Name of the side that bypasses the page cache."""
_FILL: Final = 4096
"""Maximum number of tiny objects in one set."""
_MIN_REPEATS: Final = 5
"""Number of repeats below which the footer warns that medians are not reliable."""
KEYS: Final = 1600
"""Number of keys of one call of `exists`. A long prompt has about as many pages and states."""


def run(plan: Plan, root: Path, machine: Machine, say: Callable[[str], None]) -> Generator[Row]:
    """Yield every row as soon as it is known.

    `root` is the directory for all files; the caller removes it.
    """
    steady = plan.cases & {Case.SET_CACHED}
    for size in plan.sizes:
        prefix = size_text(size)
        for cases, measure in ((steady, SizeBench.steady), (plan.cases - steady, SizeBench.growing)):
            if cases:
                with ExitStack() as stack:
                    where = Path(stack.enter_context(TemporaryDirectory(dir=root)))
                    buffers = Buffers(size, plan.count(size))
                    bench = SizeBench(
                        plan, machine, buffers, lambda doing, of=prefix: say(f"{of}: {doing}"), stack  # type: ignore[misc]
                    )  # fmt: skip
                    yield from measure(bench, where)
    if plan.objects:
        with TemporaryDirectory(dir=root) as name:
            yield from _many(plan, Path(name), say)


class SizeBench:
    """Measurement of all cases for one object size.

    Thread safety: one thread, which lets a crew of other threads call the disk.
    """

    def __init__(
        self, plan: Plan, machine: Machine, buffers: Buffers, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._plan = plan
        self._machine = machine
        self._buffers = buffers
        self._say = say
        self._one = Crew(1)
        self._many = stack.enter_context(Crew(DIRECT_THREADS))
        # Buffered calls move each object as a whole. Direct calls move pieces of at most 1 MiB.
        self._whole = pieces(self._buffers.views)
        self._cut = pieces(self._buffers.views, PIECE)

    def steady(self, root: Path) -> Iterator[Row]:
        """Measure sets into a full store, all of whose blocks were written before."""
        capacity = self._plan.capacity(self._buffers.size, STEADY_BATCHES)
        with (
            Subject(self._plan.url(root / "store", capacity), root / "store", self._buffers) as subject,
            RawFile(root / "buffered", self._buffers.nbytes) as buffered,
        ):
            self._say("filling a store")
            subject.fill(capacity)
            buffered.write(self._cut, 0, self._many)
            buffered.sync()
            yield from self._set_cached(subject, buffered)

    def growing(self, root: Path) -> Iterator[Row]:
        """Measure sets into new blocks, gets of the stored objects, and lookups."""
        plan, nbytes = self._plan, self._buffers.nbytes
        # Twice the bytes of all batches: a store rounds up and keeps a reserve.
        url = plan.url(root / "store", plan.capacity(self._buffers.size, 2 * plan.batches))
        keys = [batch_keys(self._buffers.count) for _ in range(plan.batches)]
        with (
            Subject(url, root / "store", self._buffers) as subject,
            RawFile(root / "buffered", plan.batches * nbytes) as buffered,
            RawFile(root / "direct", plan.batches * nbytes, direct=self._machine.direct) as direct,
        ):
            yield from self._set_fresh(subject, buffered, direct, keys)
            if Case.GET_WARM in plan.cases:
                yield from self._get_warm(root, subject, buffered, keys[1])
            if Case.GET_COLD in plan.cases:
                yield from self._get_cold(subject, buffered, direct, keys)
            yield from _lookups(plan, subject, [key for batch in keys for key in batch], self._say)

    def _set_cached(self, subject: Subject, buffered: RawFile) -> Iterator[Row]:
        self._say("set, cached blocks")
        keys = [batch_keys(self._buffers.count) for _ in range(self._plan.batches)]
        stored: list[ObjectKey] = []

        # Before round n, the batch of round n - 1 is removed, so that round n reuses the space of that batch.
        def give_back(n: int) -> None:
            subject.store.delete(stored)
            stored[:] = keys[n]  # the batch that this round is about to store
            warm(subject.path)

        found = self._compare_sets(
            [
                Side(STORE, lambda n: subject.put(keys[n]), give_back, lambda _: subject.store.flush()),
                self._buffered_write(buffered, lambda _: 0),
            ]
        )
        subject.store.delete(stored)
        yield from self._rows(Case.SET_CACHED, found)

    def _set_fresh(
        self, subject: Subject, buffered: RawFile, direct: RawFile, keys: Sequence[Sequence[ObjectKey]]
    ) -> Iterator[Row]:
        self._say("set, fresh blocks")
        nbytes = self._buffers.nbytes
        sides = [
            Side(STORE, lambda n: subject.put(keys[n]), after=lambda _: subject.store.flush()),
            self._buffered_write(buffered, lambda n: n * nbytes),
        ]
        if self._machine.direct:
            write = lambda n: direct.write(self._cut, n * nbytes, self._many)  # noqa: E731
            sides.append(Side(_DIRECT, write, after=lambda _: direct.sync()))
        # Gets read the objects of these sets, so the sets run even if the plan does not name their case.
        found = self._compare_sets(sides)
        if Case.SET_FRESH in self._plan.cases:
            yield from self._rows(Case.SET_FRESH, found)

    def _get_warm(
        self, root: Path, subject: Subject, buffered: RawFile, keys: Sequence[ObjectKey]
    ) -> Iterator[Row]:
        self._say("get, warm")
        # Read batch 1 of set-fresh. In the raw file, batch 1 begins where batch 0 ends.
        base = self._buffers.nbytes
        warm(root)
        subject.get(keys)
        limit = Side("preadv", lambda _: buffered.read(self._whole, base, self._one))
        found = self._compare_gets([Side(STORE, lambda _: subject.get(keys)), limit])
        yield from self._rows(Case.GET_WARM, found)

    def _get_cold(
        self, subject: Subject, buffered: RawFile, direct: RawFile, keys: Sequence[Sequence[ObjectKey]]
    ) -> Iterator[Row]:
        self._say("get, cold")
        nbytes = self._buffers.nbytes
        # Neither raw way is the faster one on all machines.
        raw = {f"preadv x {DIRECT_THREADS}": buffered} | ({_DIRECT: direct} if self._machine.direct else {})

        def read(file: RawFile, n: int) -> None:
            file.read(self._cut, n * nbytes, self._many)

        sides = [
            # The kernel reads ahead: a read of one batch may bring blocks of the next batch into the page
            # cache. Therefore the store is reopened before every round.
            Side(STORE, lambda n: subject.get(keys[n]), lambda _: subject.reopen_cold(keys[0][0])),
            *(Side(how, partial(read, file), lambda _, file=file: file.drop()) for how, file in raw.items()),  # type: ignore[misc]
        ]
        yield from self._rows(Case.GET_COLD, self._compare_gets(sides))

    def _buffered_write(self, file: RawFile, base: Callable[[int], int]) -> Side:
        """Return the side that writes through the page cache, from the thread that also calls the store."""
        return Side(
            "pwritev", lambda n: file.write(self._whole, base(n), self._one), after=lambda _: file.sync()
        )

    def _compare_sets(self, sides: Sequence[Side]) -> dict[str, float]:
        def with_buffers_read(side: Side) -> Side:
            def before(n: int) -> None:
                side.before(n)
                # Reading all buffers brings the processor's caches into the same state for all sides,
                # whatever their preparation was.
                self._buffers.check()

            return replace(side, before=before)

        return medians([with_buffers_read(side) for side in sides], self._plan.repeats)

    def _compare_gets(self, sides: Sequence[Side]) -> dict[str, float]:
        def with_check(side: Side) -> Side:
            def before(n: int) -> None:
                side.before(n)
                self._buffers.wipe()

            return replace(side, before=before, after=lambda _: self._buffers.check())

        return medians([with_check(side) for side in sides], self._plan.repeats)

    def _rows(self, case: Case, found: dict[str, float]) -> Iterator[Row]:
        """Yield a row that compares the store with the fastest raw side."""
        buffers, stored = self._buffers, found.pop(STORE)
        fastest = min(found, key=lambda way: found[way])
        yield speed(
            f"{self._plan.backend} {case.words}", buffers.size, buffers.count, stored, buffers.nbytes,
            fastest, found[fastest],
        )  # fmt: skip


def _lookups(
    plan: Plan, subject: Subject, known: Sequence[ObjectKey], say: Callable[[str], None]
) -> Iterator[Row]:
    """Measure `exists` and `open` on a store that holds the keys `known`."""

    def measured(case: Case, objects: int, side: Side) -> Row:
        seconds = medians([side], plan.repeats)[side.name]
        return speed(f"{plan.backend} {case.words}", subject.size, objects, seconds)

    if Case.EXISTS in plan.cases:
        say(Case.EXISTS.words)
        asked = [known[i % len(known)] for i in range(KEYS)]
        yield measured(Case.EXISTS, KEYS, Side(STORE, lambda _: _all_there(subject.store.exists(asked))))
    if Case.OPEN in plan.cases:
        say(Case.OPEN.words)

        def to_first_hit(_: int) -> None:
            subject.open()
            subject.first_hit(known[-1])

        opening = Side(STORE, to_first_hit, before=lambda _: subject.close())
        yield measured(Case.OPEN, subject.store.usage().objects, opening)


def _many(plan: Plan, root: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure `exists` and `open` on a separate store, with as many tiny objects as the plan requires."""
    known: list[ObjectKey] = []
    buffers = Buffers(TINY, min(_FILL, plan.objects))
    with Subject(plan.url(root / "store", plan.many_capacity), root / "store", buffers) as subject:
        for done in range(0, plan.objects, buffers.count):
            say(f"{size_text(TINY)}: filling, {done:,} objects")
            keys = batch_keys(buffers.count)
            subject.put(keys)
            # Keep every n-th key: enough keys for one call of `exists`, spread over the whole store.
            known += keys[:: max(1, plan.objects // KEYS)]
        yield from _lookups(plan, subject, known, say)


def _all_there(answers: Sequence[bool]) -> None:
    if not all(answers):
        raise StorageError("a store does not have objects that it has stored, so its speed was not measured")


def footer(plan: Plan, machine: Machine) -> list[str]:
    """Return the sentences that explain the figures."""
    said = [
        (
            f"{machine}. Medians of {plan.repeats} interleaved runs over the same buffers, from one thread."
            " A set includes computing the checksums, a get verifying them."
        ),
        (
            "limit_gbps: the speed of the fastest plain system calls for the same objects, without syncs,"
            " checks of the bytes, or a bound of the space."
        ),
    ]
    if machine.in_memory:
        said.append(
            f"The files were on {machine.file_system}, so these are figures of memory, not of a disk."
        )
    if plan.repeats < _MIN_REPEATS:
        said.append(f"Medians of fewer than {_MIN_REPEATS} runs are not reliable; raise --repeat.")
    return said
