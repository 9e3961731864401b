"""Bytes of LMDB's file that change by themselves, with the file's times as they were: rot.

Bytes of every kind of page are changed, of a closed store or under an open one. Then the store is used three
times, each time by a process of its own. No call may raise but as the contract says, no bytes may be wrong,
and no process but the first may be ended by a signal. At the third start the counters must be right, and the
store must take objects; it may be empty.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.campaign.actors import Killer, Part, job, say
from tests.campaign.model import Verdict
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery
from tests.storage_backends.lmdb.hooks import page_kinds
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.objects import NAMESPACE, content, key, payload, to_get, to_set

CAPACITY, NAMES, NEW = 16 << 20, 600, 40
PAGE = 4096
SIZES = (90, 700, 1500, 6000, 20_000, 70_000)
MAY_REFUSE = ("exists", "delete", "scan", "describe", "namespaces", "usage", "coldest", "flush")
"""Calls from which a StorageError may come."""
FIGURES = ("signal", "signal again", "raised", "counters", "emptied")


def campaign(run: Run) -> Iterator[Row]:
    """One row for a store that is closed when bytes change, and one for a store that is open."""
    with TemporaryDirectory(dir=run.base) as directory, Nursery() as nursery:
        made = Subject(run.kind, Path(directory) / "made", CAPACITY)
        nursery.played(Part("fill", made.fields))
        for when in ("closed", "open"):
            row = Row("rot", f"{run.kind}, {when}", figures=dict.fromkeys(FIGURES, 0))
            yield run.row(row, partial(trial, nursery, row, made, when))


def trial(nursery: Nursery, row: Row, made: Subject, when: str, seed: int, directory: Path) -> Verdict:
    """Change bytes of a copy, and use it three times."""
    random, subject = Random(seed), made.at(directory / "store")
    shutil.copytree(made.path, subject.path)
    data = subject.path / "database" / "data.mdb"
    role, changes = rot(data, random)
    if when == "closed":
        change(data, changes)
    first = [json.dumps(changes)] if when == "open" else []
    statuses, answers = [], []
    for how in (first, [], []):
        statuses.append(nursery.played(Part("decay", subject.fields, how=how)))
        answers.append(json.loads(nursery.words.get("found", "{}")))
        if statuses[-1] > 0:
            answers[-1].setdefault("raised", []).append(nursery.died)
    raised = [what for found in answers for what in found.get("raised", [])]
    last = answers[-1]
    verdict = Verdict(wrong=sum(found.get("wrong", 0) for found in answers), present=last.get("hits", 0))
    figures = {
        "signal": statuses[0] < 0,
        "signal again": sum(status < 0 for status in statuses[1:]),
        "raised": len(raised),
        "counters": not last.get("counted"),
        "emptied": last.get("hits", 0) < NAMES // 4,
    }
    row.count(figures)
    verdict.failed = sum(figures[name] for name in ("signal again", "raised", "counters"))
    if verdict.failed or verdict.wrong or figures["signal"]:
        hits = [found.get("hits") for found in answers]
        verdict.notes.append(f"{role} {changes}: {statuses}, hits {hits}, {raised or last}")
    return verdict


def rot(data: Path, random: Random) -> tuple[str, list[tuple[int, int]]]:
    """Choose bytes to be changed on one page: its role, and (offset, mask) of each."""
    kinds = page_kinds(str(data)) | {"meta": [0, 1]}
    role = random.choice(sorted(kinds))
    page = random.choice(kinds[role])
    with data.open("rb") as file:
        file.seek(page * PAGE)
        [lower] = struct.unpack_from("<12xH", file.read(PAGE))
    end = 152 if role == "meta" else random.choice((16, max(17, min(lower, PAGE)), PAGE))
    start = 16 if end > 17 and random.random() < 0.5 else 0
    at = page * PAGE + random.randrange(start, end)
    count = random.choice((1, 1, 1, 4, 8))
    return role, [(at + n, random.randint(1, 255)) for n in range(count)]


def change(data: Path, changes: list[tuple[int, int]]) -> None:
    """Change bytes in place, and leave the file's times as they were."""
    before = data.stat()
    fd = os.open(data, os.O_RDWR)
    for offset, mask in changes:
        [value] = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([value ^ mask]), offset)
    os.close(fd)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


def size_of(name: int) -> int:
    return SIZES[name % len(SIZES)] + name


@job
def fill(part: Part, _env: Killer) -> None:
    """Make a store with objects of many sizes, some of them removed, and used ones."""
    with part.subject.open() as store:
        store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}, states=True))
        for start in range(0, NAMES, 20):
            names = range(start, start + 20)
            store.set([to_set(key(name), payload(name, size_of(name))) for name in names])
        store.get([to_get(key(name), size_of(name)) for name in range(100)])
        store.delete([key(name) for name in range(0, NAMES, 9)])
        store.flush()
        store.get([to_get(key(name), size_of(name)) for name in range(100, 200)])


@job
def decay(part: Part, _env: Killer) -> None:
    """Use every call of a store, under which bytes may change, and count what is wrong. Says "found"."""
    found: dict[str, Any] = {"raised": [], "wrong": 0, "hits": 0}
    with part.subject.open() as store:
        if part.how:
            store.get([to_get(key(1), size_of(1))])
            change(part.subject.path / "database" / "data.mdb", json.loads(part.how[0]))
        _use(store, found)
        say("found", json.dumps(found))
    with part.subject.open() as store:
        found["counted"] = _is_counted(store)
        say("found", json.dumps(found))


def _use(store: StorageBackend, found: dict[str, Any]) -> None:
    """Make every call."""

    def call(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except StorageError as error:
            if name not in MAY_REFUSE:
                found["raised"].append(f"{name}: {error!r}")
        except Exception as error:  # noqa: BLE001 (whatever it is, it may not be)
            found["raised"].append(f"{name}: {error!r}")
        return ()

    def read(names: range) -> None:
        items = [to_get(key(name), size_of(name)) for name in names]
        answers = call("get", lambda: store.get(items))
        for name, item, answer in zip(names, items, answers, strict=False):
            found["hits"] += answer is Outcome.HIT
            found["wrong"] += answer is Outcome.HIT and content(item) != payload(name, size_of(name))

    new = range(NAMES, NAMES + NEW)
    for start in range(0, NAMES, 50):
        read(range(start, start + 50))
    hits, old = found["hits"], [key(name) for name in range(NAMES)]
    call("exists", lambda: store.exists(old))
    answers = call("set", lambda: store.set([to_set(key(n), payload(n, size_of(n))) for n in new]))
    found["stored"] = Counter(str(answer.value) for answer in answers)
    read(new)
    call("delete", lambda: store.delete([key(n) for n in (*new, 5, 50, 500)]))
    call("register_namespace", lambda: store.register_namespace(NamespaceRecord(b"n" * 32, {"model": "n"})))
    call("namespaces", store.namespaces)
    call("scan", lambda: list(store.scan_all()))
    call("describe", lambda: store.describe(old))
    call("usage", store.usage)
    call("coldest", lambda: store.coldest(1 << 20))
    call("set", lambda: store.set([to_set(key(n), payload(n, size_of(n))) for n in range(5, 500, 45)]))
    call("flush", store.flush)
    found["hits"] = hits


def _is_counted(store: StorageBackend) -> bool:
    """Return whether the counters agree with what a scan finds, and a new object is taken."""
    sizes = [entry.meta.length for entry in store.scan_all()]
    usage = store.usage()
    taken = store.set([to_set(key("x"), b"x")]) == [Outcome.STORED] and store.delete([key("x")]) == [True]
    return taken and (usage.objects, usage.payload_bytes) == (len(sizes), sum(sizes))
