"""A run of `bench disk`, which prepares the disk and the page cache for each case and compares the calls.

Each case compares several ways to move the same batch. A way is a `Side`: the store, raw system calls, or
one file per page. Sizes of objects are measured one after the other. The directories of a size are removed
before the next size begins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tiercache.core import ObjectKey
from tiercache.errors import StorageError
from tiercache_lab.bench.baselines import DIRECT_THREADS, PIECE, Copier, Page, PageFiles, RawFile, pieces
from tiercache_lab.bench.machine import Machine, drop, settle, warm
from tiercache_lab.bench.plan import TINY, Case, Plan, files_target_of, target_of
from tiercache_lab.bench.rows import Note, Row, Target, size_text, speed
from tiercache_lab.bench.subject import Buffers, Subject, batch_keys
from tiercache_lab.bench.timing import Crew, Side, medians

STORE: Final = "store"
"""Name of the side that calls the store."""
FILES: Final = "files"
"""Name of the side that has one file per page."""
_DIRECT: Final = f"O_DIRECT x {DIRECT_THREADS}"
"""Name of the side that bypasses the page cache."""


class SizeBench:
    """Measurement of all cases for one object size.

    Thread safety: one thread, which lets crews of other threads call the disk.
    """

    def __init__(
        self, plan: Plan, machine: Machine, buffers: Buffers, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._plan = plan
        self._machine = machine
        self._buffers = buffers
        self._say = say
        self._callers = stack.enter_context(Crew(plan.threads))
        self._many = stack.enter_context(Crew(DIRECT_THREADS))
        self._pages = [
            [Page(f"{n:03d}-{i:03d}", view) for i, view in enumerate(buffers.views)]
            for n in range(plan.batches)
        ]
        # Buffered calls move each object as a whole. Direct calls move pieces of at most 1 MiB.
        self._whole = pieces(self._buffers.views)
        self._cut = pieces(self._buffers.views, PIECE)

    def steady(self, root: Path) -> Iterator[Row | Note]:
        """Measure sets into a full store, all of whose blocks were written before."""
        plan, nbytes = self._plan, self._buffers.nbytes
        capacity = plan.steady_capacity(self._buffers.size)
        url = plan.url(root / "store", capacity)
        files = PageFiles(root / FILES, self._callers, durable=plan.durable)
        with (
            Subject(url, root / "store", self._buffers, self._callers) as subject,
            RawFile(root / "buffered", nbytes) as buffered,
        ):
            self._say("filling a store")
            subject.fill(capacity)
            buffered.write(self._cut, 0, self._many)
            buffered.sync()
            yield from self._set_cached(subject, buffered, files)
            yield from _notes(subject)

    def growing(self, root: Path) -> Iterator[Row | Note]:
        """Measure sets into new blocks, gets of the stored objects, and lookups."""
        plan, nbytes = self._plan, self._buffers.nbytes
        url = plan.url(root / "store", plan.growing_capacity(self._buffers.size))
        keys = [batch_keys(self._buffers.count) for _ in range(plan.batches)]
        files = PageFiles(root / FILES, self._callers, durable=plan.durable)
        with (
            Subject(url, root / "store", self._buffers, self._callers) as subject,
            RawFile(root / "buffered", plan.batches * nbytes) as buffered,
            RawFile(root / "direct", plan.batches * nbytes, direct=self._machine.direct) as direct,
        ):
            yield from self._set_fresh(subject, buffered, direct, files, keys)
            yield from missing(subject, plan.batches * self._buffers.count)
            if Case.GET_WARM in plan.cases:
                yield from self._get_warm(root, subject, buffered, files, keys[1])
            if Case.GET_COLD in plan.cases:
                yield from self._get_cold(root, subject, buffered, direct, files, keys)
            known = [key for batch in keys for key in batch]
            yield from lookups(plan, subject, known, self._say, files, self._pages)
            yield from _notes(subject)

    def _set_cached(self, subject: Subject, buffered: RawFile, files: PageFiles) -> Iterator[Row]:
        self._say("set, cached blocks")
        keys = [batch_keys(self._buffers.count) for _ in range(self._plan.batches)]
        stored: list[ObjectKey] = []

        # Before round n, the store and the files remove the batch of round n - 1, so that round n reuses the
        # space of that batch.
        def free(n: int) -> None:
            if n:
                files.remove(self._pages[n - 1])
            settle(files.directory)

        def give_back(n: int) -> None:
            subject.delete(stored)
            stored[:] = keys[n]  # the batch that this round is about to store
            warm(subject.path)

        found = self._compare_sets(
            [
                Side(STORE, lambda n: subject.put(keys[n]), give_back, lambda _: subject.store.flush()),
                self._buffered_write(buffered, lambda _: 0),
                replace(self._put(files), before=free),
            ]
        )
        subject.delete(stored)
        yield from self._rows(Case.SET_CACHED, found)

    def _set_fresh(
        self,
        subject: Subject,
        buffered: RawFile,
        direct: RawFile,
        files: PageFiles,
        keys: Sequence[Sequence[ObjectKey]],
    ) -> Iterator[Row]:
        self._say("set, fresh blocks")
        nbytes = self._buffers.nbytes
        sides = [
            Side(STORE, lambda n: subject.put(keys[n]), after=lambda _: subject.store.flush()),
            self._buffered_write(buffered, lambda n: n * nbytes),
            *self._direct_write(direct, lambda n: n * nbytes),
            self._put(files),
        ]
        # Gets read the objects of these sets, so the sets run even if the plan does not name their case.
        found = self._compare_sets(sides)
        if Case.SET_FRESH in self._plan.cases:
            yield from self._rows(Case.SET_FRESH, found)

    def _get_warm(
        self, root: Path, subject: Subject, buffered: RawFile, files: PageFiles, keys: Sequence[ObjectKey]
    ) -> Iterator[Row]:
        self._say("get, warm")
        # Read batch 1 of set-fresh. In the raw file, batch 1 begins where batch 0 ends.
        base = self._buffers.nbytes
        warm(root)
        subject.get(keys)
        with ExitStack() as stack:
            if self._plan.backend == "lmdb":
                copier = stack.enter_context(Copier(buffered.map(base)))
                limit = Side("copy from map", lambda _: copier.copy(self._whole, self._callers))
            else:
                limit = Side("preadv", lambda _: buffered.read(self._whole, base, self._callers))
            sides = [Side(STORE, lambda _: subject.get(keys)), limit, self._get(files, lambda _: 1)]
            found = self._compare_gets(sides)
        yield from self._rows(Case.GET_WARM, found)

    def _get_cold(
        self,
        root: Path,
        subject: Subject,
        buffered: RawFile,
        direct: RawFile,
        files: PageFiles,
        keys: Sequence[Sequence[ObjectKey]],
    ) -> Iterator[Row | Note]:
        self._say("get, cold")
        nbytes = self._buffers.nbytes
        drop(files.directory)
        buffered.drop()
        if buffered.cached() and not self._machine.in_memory:
            yield Note(
                "the page cache could not be dropped on this machine, so get cold is the same as get warm"
            )
        # Neither raw way is the faster one on all machines.
        raw = {f"preadv x {DIRECT_THREADS}": buffered} | ({_DIRECT: direct} if self._machine.direct else {})

        def read(file: RawFile, n: int) -> None:
            file.read(self._cut, n * nbytes, self._many)

        sides = [
            # The kernel reads ahead: a read of one batch may bring blocks of the next batch into the page
            # cache. Therefore the store is reopened before every round.
            Side(STORE, lambda n: subject.get(keys[n]), lambda _: subject.reopen_cold(keys[0][0])),
            *(Side(how, partial(read, file), partial(_drop, file)) for how, file in raw.items()),
            self._get(files, lambda n: n),
        ]
        yield from self._rows(Case.GET_COLD, self._compare_gets(sides))

    def _put(self, files: PageFiles) -> Side:
        """Return the side that stores batch n in round n, one file per page."""
        return Side(FILES, lambda n: files.put(self._pages[n]), after=lambda _: settle(files.directory))

    def _get(self, files: PageFiles, batch: Callable[[int], int]) -> Side:
        """Return the side that reads batch `batch(n)` in round n, one file per page."""
        return Side(FILES, lambda n: files.get(self._pages[batch(n)]))

    def _buffered_write(self, file: RawFile, base: Callable[[int], int]) -> Side:
        """Return the side that writes through the page cache, with as many threads as call the store."""

        def write(n: int) -> None:
            file.write(self._whole, base(n), self._callers)
            if self._plan.durable:
                file.sync()

        return Side("pwritev", write, after=lambda _: file.sync())

    def _direct_write(self, file: RawFile, base: Callable[[int], int]) -> list[Side]:
        """Return the side that bypasses the page cache, or no side if O_DIRECT is not possible."""

        def write(n: int) -> None:
            file.write(self._cut, base(n), self._many)
            if self._plan.durable:
                file.sync()

        return [Side(_DIRECT, write, after=lambda _: file.sync())] if self._machine.direct else []

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
        """Yield a row that compares the store with the fastest raw side, and one with the files."""
        plan, buffers = self._plan, self._buffers
        raw = {way: seconds for way, seconds in found.items() if way not in (STORE, FILES)}
        fastest = min(raw, key=lambda way: raw[way])
        target = target_of(plan.backend, case, buffers.size, buffers.count)

        def row(name: str, limit: str, seconds: float, target: Target | None) -> Row:
            return speed(
                f"{plan.backend} {name}",
                buffers.size,
                buffers.count,
                found[STORE],
                buffers.nbytes,
                limit,
                seconds,
                None if plan.durable else target,
            )

        yield row(case.words, fastest, raw[fastest], target)
        target = files_target_of(plan.backend, case)
        yield row(f"{case.words} / {FILES}", "file per page", found[FILES], target)


def _drop(file: RawFile, _: int) -> None:
    file.drop()


def _notes(subject: Subject) -> Iterator[Note]:
    """Yield what the store reports about its reads and writes, if it does."""
    told = {
        name: value for name, value in subject.usage().details.items() if name.startswith(("io", "direct"))
    }
    if told:
        yield Note("the store reports: " + ", ".join(f"{name} {value}" for name, value in told.items()))


_FILL: Final = 4096
"""Maximum number of tiny objects in one set."""
_MIN_REPEATS: Final = 5
"""Number of repeats below which the footer warns that medians are not reliable."""
_KEYS: Final = 1600
"""Number of keys of one call of `exists`. A long prompt has about as many pages and states."""
_FULL_STORE_CASES: Final = frozenset({Case.SET_CACHED})
"""Cases that run on a full store; all other cases run on a growing store."""


def run(plan: Plan, root: Path, machine: Machine, say: Callable[[str], None]) -> Generator[Row | Note]:
    """Yield every row and note as soon as it is known.

    `root` is the directory for all files; the caller removes it.
    """
    for size in plan.sizes:
        for wanted, cases in (
            (plan.cases & _FULL_STORE_CASES, SizeBench.steady),
            (plan.cases - _FULL_STORE_CASES, SizeBench.growing),
        ):
            if wanted:
                with ExitStack() as stack:
                    where = Path(stack.enter_context(TemporaryDirectory(dir=root)))
                    yield from cases(
                        SizeBench(
                            plan,
                            machine,
                            Buffers(size, plan.count(size)),
                            _prefixed(say, size_text(size)),
                            stack,
                        ),
                        where,
                    )
    if plan.objects:
        with TemporaryDirectory(dir=root) as name:
            yield from many(
                plan, Buffers(TINY, min(_FILL, plan.objects)), Path(name), _prefixed(say, size_text(TINY))
            )


def _prefixed(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda doing: say(f"{prefix}: {doing}")


def lookups(
    plan: Plan,
    subject: Subject,
    known: Sequence[ObjectKey],
    say: Callable[[str], None],
    files: PageFiles | None = None,
    pages: Sequence[Sequence[Page]] = (),
) -> Iterator[Row]:
    """Measure `exists` and `open` on a store that holds the keys `known`.

    `exists` is compared with `files`, which hold the batches `pages`.
    """

    def to_first_hit(_: int) -> None:
        subject.open()
        subject.first_hit(known[-1])

    if Case.EXISTS in plan.cases:
        say(Case.EXISTS.words)
        yield from _exists(plan, subject, known, files, pages)
    if Case.OPEN in plan.cases:
        say(Case.OPEN.words)
        objects = subject.usage().objects
        side = Side("store", to_first_hit, before=lambda _: subject.close())
        yield speed(
            f"{plan.backend} {Case.OPEN.words}",
            subject.size,
            objects,
            medians([side], plan.repeats)[side.name],
            target=target_of(plan.backend, Case.OPEN, subject.size, objects),
        )


def _exists(
    plan: Plan,
    subject: Subject,
    known: Sequence[ObjectKey],
    files: PageFiles | None,
    pages: Sequence[Sequence[Page]],
) -> Iterator[Row]:
    """Measure one call of `exists` for `_KEYS` keys; if fewer keys are known, they are repeated.

    Files are asked about each of their batches as a whole, and their time is scaled to as many keys.
    """
    asked = [known[i % len(known)] for i in range(_KEYS)]

    sides = [Side(STORE, lambda _: _all_there(subject.store.exists(asked)))]
    if files is not None:
        sides.append(Side(FILES, lambda _: _all_there(files.count(batch) == len(batch) for batch in pages)))
    found = medians(sides, plan.repeats)
    name, seconds = f"{plan.backend} {Case.EXISTS.words}", found[STORE]
    target = target_of(plan.backend, Case.EXISTS, subject.size, _KEYS)
    yield speed(name, subject.size, _KEYS, seconds, target=target)
    if files is not None:
        theirs = found[FILES] * _KEYS / sum(map(len, pages))
        yield speed(
            f"{name} / {FILES}", subject.size, _KEYS, seconds, limit="file per page", limit_seconds=theirs
        )


def many(plan: Plan, buffers: Buffers, root: Path, say: Callable[[str], None]) -> Iterator[Row | Note]:
    """Measure `exists` and `open` on a separate store, with as many tiny objects as the plan requires."""
    known: list[ObjectKey] = []
    with (
        Crew(plan.threads) as callers,
        Subject(plan.url(root / "store", plan.many_capacity), root / "store", buffers, callers) as subject,
    ):
        for done in range(0, plan.objects, buffers.count):
            say(f"filling, {done:,} objects")
            keys = batch_keys(buffers.count)
            subject.put(keys)
            # Keep every n-th key: enough keys for one call of `exists`, spread over the whole store.
            known += keys[:: max(1, plan.objects // _KEYS)]
        yield from missing(subject, -(-plan.objects // buffers.count) * buffers.count)
        yield from lookups(plan, subject, known, say)


def missing(subject: Subject, stored: int) -> Iterator[Note]:
    """Yield a note if the store has fewer than `stored` objects, because it evicted some."""
    if (kept := subject.usage().objects) < stored:
        yield Note(f"the store kept only {kept:,} of {stored:,} objects of {size_text(subject.size)}")


def _all_there(answers: Iterable[bool]) -> None:
    if not all(answers):
        raise StorageError("a store does not have objects that it has stored, so its speed was not measured")


def footer(plan: Plan, machine: Machine, notes: Sequence[Note]) -> list[str]:
    """Return the sentences that explain the figures."""
    said = [
        (
            f"{machine}. Durability {'power' if plan.durable else 'process'}; calling threads:"
            f" {plan.threads}; medians of {plan.repeats} interleaved runs over the same buffers. A set"
            " includes computing the checksums, a get verifying them."
        ),
        (
            "limit_gbps: of the fastest plain system calls that move the same objects, or in rows of files of"
            f" one file per page: a set syncs {'every file' if plan.durable else 'nothing'}, a get verifies"
            " nothing, and nothing bounds the space."
        ),
    ]
    if machine.in_memory:
        said.append(
            f"The files were on {machine.file_system}, so these are figures of memory, not of a disk."
        )
    if plan.repeats < _MIN_REPEATS:
        said.append(f"Medians of fewer than {_MIN_REPEATS} runs are not reliable; raise --repeat.")
    # Several sizes may give the same note, which is shown once.
    return said + [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(note.text for note in notes)]
