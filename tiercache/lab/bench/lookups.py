"""Cases without payload: `exists`, and `open`. The time of `open` ends with the first hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tiercache.core import ObjectKey
from tiercache.errors import StorageError
from tiercache.lab.bench.plan import Plan
from tiercache.lab.bench.rows import Case, Note, Row, size_text, target_of
from tiercache.lab.bench.subject import Buffers, Subject, batch_keys
from tiercache.lab.bench.timing import Crew, Side, medians

_KEYS: Final = 1600
"""Number of keys of one call of `exists`. A long prompt has about as many pages and states."""


def lookups(
    plan: Plan, subject: Subject, known: Sequence[ObjectKey], say: Callable[[str], None]
) -> Iterator[Row]:
    """Measure `exists` and `open` on a store that holds the keys `known`.

    If there are fewer keys than one call of `exists` takes, the keys are repeated.
    """

    def row(case: Case, objects: int, side: Side) -> Row:
        say(case.words)
        seconds = medians([side], plan.repeats)[side.name]
        return Row(
            f"{plan.backend} {case.words}",
            subject.size,
            objects,
            seconds,
            target=target_of(plan.backend, case, subject.size, objects),
        )

    def to_first_hit(_: int) -> None:
        subject.open()
        subject.first_hit(known[-1])

    if Case.EXISTS in plan.cases:
        asked = [known[i % len(known)] for i in range(_KEYS)]
        yield row(Case.EXISTS, _KEYS, Side("store", lambda _: _all_there(subject.store.exists(asked))))
    if Case.OPEN in plan.cases:
        yield row(
            Case.OPEN, subject.usage().objects, Side("store", to_first_hit, before=lambda _: subject.close())
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


def _all_there(answers: Sequence[bool]) -> None:
    if not all(answers):
        raise StorageError(
            "the store does not have objects that it has stored, so its speed was not measured"
        )
