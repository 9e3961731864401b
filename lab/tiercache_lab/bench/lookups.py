"""Cases without payload: `exists`, and `open`. The time of `open` ends with the first hit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tiercache.core import ObjectKey
from tiercache.errors import StorageError
from tiercache_lab.bench.plan import Plan
from tiercache_lab.bench.rivals import Page, Rival
from tiercache_lab.bench.rows import Case, Note, Row, size_text, target_of
from tiercache_lab.bench.subject import Buffers, Subject, batch_keys
from tiercache_lab.bench.timing import Crew, Side, medians

_KEYS: Final = 1600
"""Number of keys of one call of `exists`. A long prompt has about as many pages and states."""


def lookups(
    plan: Plan,
    subject: Subject,
    known: Sequence[ObjectKey],
    say: Callable[[str], None],
    rivals: Mapping[str, Rival],
    pages: Sequence[Sequence[Page]],
) -> Iterator[Row]:
    """Measure `exists` and `open` on a store that holds the keys `known`.

    The rivals hold the batches `pages`, and only `exists` is compared with them.
    """

    def to_first_hit(_: int) -> None:
        subject.open()
        subject.first_hit(known[-1])

    if Case.EXISTS in plan.cases:
        say(Case.EXISTS.words)
        yield from _exists(plan, subject, known, rivals, pages)
    if Case.OPEN in plan.cases:
        say(Case.OPEN.words)
        objects = subject.usage().objects
        side = Side("store", to_first_hit, before=lambda _: subject.close())
        yield Row(
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
    rivals: Mapping[str, Rival],
    pages: Sequence[Sequence[Page]],
) -> Iterator[Row]:
    """Measure one call of `exists` for `_KEYS` keys; if fewer keys are known, they are repeated.

    A rival is asked about each of its batches as a whole, and its time is scaled to as many keys.
    """
    asked = [known[i % len(known)] for i in range(_KEYS)]

    def count(rival: Rival, _: int) -> None:
        _all_there(rival.count(batch) == len(batch) for batch in pages)

    found = medians(
        [
            Side("store", lambda _: _all_there(subject.store.exists(asked))),
            *(Side(name, partial(count, rival)) for name, rival in rivals.items()),
        ],
        plan.repeats,
    )
    name, seconds = f"{plan.backend} {Case.EXISTS.words}", found["store"]
    target = target_of(plan.backend, Case.EXISTS, subject.size, _KEYS)
    yield Row(name, subject.size, _KEYS, seconds, target=target)
    for beside, rival in rivals.items():
        theirs = found[beside] * _KEYS / sum(map(len, pages))
        yield Row(f"{name} / {beside}", subject.size, _KEYS, seconds, limit=rival.title, limit_seconds=theirs)


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
        yield from lookups(plan, subject, known, say, {}, ())


def missing(subject: Subject, stored: int) -> Iterator[Note]:
    """Yield a note if the store has fewer than `stored` objects, because it evicted some."""
    if (kept := subject.usage().objects) < stored:
        yield Note(f"the store kept only {kept:,} of {stored:,} objects of {size_text(subject.size)}")


def _all_there(answers: Iterable[bool]) -> None:
    if not all(answers):
        raise StorageError("a store does not have objects that it has stored, so its speed was not measured")
