"""Campaign that takes away what a store needs while it works.

Its directory disappears, the right to it, its file system, the end of LMDB's file, or the disk below LMDB: a
library that is compiled and preloaded (`below.c`) lets LMDB's own calls fail. Meanwhile no call may
raise except those that are allowed to (StorageError from `flush` and the listing calls), no bytes may be
wrong, and what is answered with STORED must be there once everything is back. Mounting and becoming another
user require root.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.actors import Killer, Part, job, say, work
from tests.campaign.model import KINDS, History, Ledger, Model, Op, Verdict, Version, perform
from tests.campaign.power import mounted, new_image, unfit
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.objects import NAMESPACE, content, key, to_get

CAPACITY, NAMES = 16 << 20, 60
NOBODY = 65534
SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32)."""
SYNCED, AS_IT_IS = 0, 2
"""Shut down with everything written back first, or without even the journal."""

Away = Callable[[Path, Random], Callable[[], None]]
"""Takes something away; what it returns brings it back."""


def removed(path: Path, _random: Random) -> Callable[[], None]:
    """The directory and all that is in it."""
    shutil.rmtree(path)
    return lambda: None


def replaced(path: Path, _random: Random) -> Callable[[], None]:
    """The directory is moved away, and an empty one is in its place."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()

    def back() -> None:
        shutil.rmtree(path)
        aside.rename(path)

    return back


def forbidden(path: Path, _random: Random) -> Callable[[], None]:
    """Forbid everybody to enter the directory (mode 000)."""
    path.chmod(0)
    return lambda: path.chmod(0o700)


def read_only(path: Path, _random: Random) -> Callable[[], None]:
    """The file system met an error and is read-only from now on."""
    subprocess.run(["mount", "-o", "remount,abort", str(path.parent)], check=True, capture_output=True)
    return lambda: None


def shut_down(flags: int) -> Away:
    """The file system answers everything with an error from now on."""

    def away(path: Path, _random: Random) -> Callable[[], None]:
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flags))
        finally:
            os.close(fd)
        return lambda: None

    return away


def cut(path: Path, random: Random) -> Callable[[], None]:
    """The log or LMDB's file is cut."""
    [data] = [*path.glob("catalog/*.log"), *path.glob("database/data.mdb")]
    os.truncate(data, random.choice((0, 4096, random.randrange(data.stat().st_size))))
    return lambda: None


def below(which: int) -> Away:
    """LMDB's own calls fail, from one of the next ones on: a kind of `below.c`."""

    def away(_path: Path, random: Random) -> Callable[[], None]:
        fail = ctypes.CDLL(None).below
        fail(which, random.choice((errno.EIO, errno.ENOSPC)), random.randrange(6))
        return lambda: fail(0, 0, 0)

    return away


BELOW = {
    "writes fail": below(1),
    "writes are short": below(2),
    "syncs fail": below(3),
    "reads fail": below(4),
}
AWAY: dict[str, Away] = {
    "removed": removed, "replaced": replaced, "chmod 000": forbidden, "read-only": read_only,
    "shut down": shut_down(SYNCED), "shut down at once": shut_down(AS_IT_IS), "database cut": cut, **BELOW,
}  # fmt: skip
ON_AN_IMAGE = ("read-only", "shut down", "shut down at once")
RACE = "database cut in a call"
FIGURES = ("stored while gone", "flushed while gone", "works again", "evicted")


def campaign(run: Run) -> Iterator[Row]:
    """One row for each thing that goes away."""
    why = unfit()
    with _preloaded(run.base), Nursery() as nursery:
        for name in (*AWAY, RACE):
            row = Row("gone", f"{run.kind}, {name}", skipped=_unfit(name, run.base, why))
            if not row.skipped:
                row.figures = dict.fromkeys((*FIGURES, "SIGBUS"), 0)
                run.row(row, partial(trial, nursery, row, run.kind, name))
            yield row


@contextmanager
def _preloaded(base: Path) -> Iterator[None]:
    """Processes that are started meanwhile have `below.c` in them, where there is a compiler."""
    if shutil.which("cc") is None:
        yield
        return
    library, source = base / "below.so", Path(__file__).with_name("below.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]


def _unfit(name: str, base: Path, no_image: str) -> str:
    if name in BELOW and shutil.which("cc") is None:
        return "skipped: no compiler (cc)"
    if name in ON_AN_IMAGE and no_image:
        return f"skipped: {no_image}"
    if name == "chmod 000":
        if os.geteuid() != 0:
            return "skipped: becoming another user takes root"
        base.chmod(0o711)
        able = (
            subprocess.run(
                ["ls", str(base / "..")], user=NOBODY, group=NOBODY, capture_output=True, check=False
            ).returncode
            == 0
        )
        return "" if able else f"skipped: another user cannot enter {base.parent}"
    return ""


def trial(nursery: Nursery, row: Row, kind: str, name: str, seed: int, directory: Path) -> Verdict:
    """Let a process work, take something away, let it go on, bring it back; then look."""
    with ExitStack() as stack:
        ledger = str(directory / "ledger")
        place = Place(directory, stack, on_an_image=name in ON_AN_IMAGE)
        subject = Subject(
            kind, place.enter() / "store", CAPACITY, "power" if name in ON_AN_IMAGE else "process"
        )
        if name == "chmod 000":
            os.chown(directory, NOBODY, NOBODY)
        part = Part(
            "bereaved", subject.fields, NAMES, Model().to_json(), ledger=ledger, seed=seed, how=[name]
        )
        status = _race(nursery, part, seed) if name == RACE else nursery.played(part)
        model = Model()
        complaints = Ledger.replay(ledger, model)
        after, figures = since(ledger)
        row.count(figures | {"SIGBUS": status == -signal.SIGBUS})
        if status != 0 and not (name == RACE and status == -signal.SIGBUS):
            complaints.append(f"it ended with status {status}: {nursery.died}")
        lasting = model.certain()
        if name == "removed":
            lasting = {version for version in lasting if figures["flushed while gone"] or version in after}
        must = sorted(set() if "cut" in name else lasting)
        subject = subject.at(place.again() / "store")
        verdict = nursery.looked(
            Part("look", subject.fields, NAMES, model.to_json(), must=must, checks="cut" not in name)
        )
        # Where no slab can be made, a new object may take the place of an old one, which the store counts.
        verdict.lost = max(0, verdict.lost - figures["evicted"])
        verdict.failed += len(complaints)
        verdict.notes += complaints
        return verdict


class Place:
    """Location of the store: a directory, or a file system in an image.

    The image is mounted anew before the store is judged.

    Thread safety: one thread.
    """

    def __init__(self, directory: Path, stack: ExitStack, *, on_an_image: bool) -> None:
        self._directory, self._outer, self._image = directory, stack, on_an_image
        self._inner = stack.enter_context(ExitStack())

    def enter(self) -> Path:
        """For the work."""
        return self._mount("before", new_image(self._directory / "image")) if self._image else self._directory

    def again(self) -> Path:
        """For the look."""
        self._inner.close()
        return self._mount("after", self._directory / "image") if self._image else self._directory

    def _mount(self, name: str, image: Path) -> Path:
        where, _ = self._inner.enter_context(mounted(image, self._directory / name))
        return where


def since(ledger: str) -> tuple[set[Version], dict[str, int]]:
    """Return the versions stored while something was gone, and counts, all read from a ledger."""
    stored: set[Version] = set()
    figures = dict.fromkeys(FIGURES, 0)
    gone, op = False, Op("flush")
    for line in Path(ledger).read_text().splitlines():
        kind, *rest = json.loads(line)
        if kind == "gone":
            gone = rest[0]
        elif kind == "again":
            figures["works again"] += rest[0]
        elif kind == "evicted":
            figures["evicted"] = rest[0]
        elif kind == "done" and gone:
            figures["flushed while gone"] += op.kind == "flush"
            stored |= {
                v
                for v, answer in zip(op.versions, rest[0], strict=False)
                if answer == Outcome.STORED and op.kind == "set"
            }
        elif kind in KINDS:
            op = Op(kind, [Version(*pair) for pair in rest[0]])
    figures["stored while gone"] = len(stored)
    return stored, figures


def _race(nursery: Nursery, part: Part, seed: int) -> int:
    """Cut the file from outside while the process works."""
    path, random = part.subject.path, Random(seed)
    nursery.start(part)
    nursery.hear("working")
    time.sleep(random.uniform(0, 0.2))
    with suppress(FileNotFoundError):
        cut(path, random)
    return nursery.wait()


@job
def bereaved(part: Part, env: Killer) -> None:
    """Work; go on while something is gone; go on when it is back."""
    [name] = part.how
    random = Random(part.seed)
    ledger = Ledger(part.ledger)
    if name == "chmod 000":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    store = part.subject.open(env)
    model, history = Model.from_json(part.model), History(part.seed, part.names)
    work(store, model, ledger, history, range(15), evicts=False)
    store.flush()
    say("working")
    if name == RACE:
        for _ in range(60):
            boldly(store, model, ledger, history)
    else:
        back = AWAY[name](part.subject.path, random)
        ledger.note("gone", True)
        for _ in range(25):
            boldly(store, model, ledger, history)
        listing(store, ledger)
        back()
        ledger.note("gone", False)
        last = Op("set", [Version(part.names - 1, model.turn + 1)])
        ledger.note("again", Outcome.STORED in make(store, model, ledger, last))
        with suppress(StorageError):
            ledger.note("evicted", int(store.usage().details.get("evicted", 0)))
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 (whatever it is, it may not be)
        ledger.note("bad", f"close raised {error!r}")


def boldly(store: StorageBackend, model: Model, ledger: Ledger, history: History) -> None:
    """One call of a history, whatever it answers."""
    op = history.draw(model)
    if op.kind == "get":
        read(store, op, ledger)
    else:
        make(store, model, ledger, op)


def make(store: StorageBackend, model: Model, ledger: Ledger, op: Op) -> list[Any]:
    """A call that changes something, noted; empty where it was not answered."""
    ledger.note(op.kind, [list(v) for v in op.versions])
    model.begin(op)
    try:
        answers = perform(store, op)
    except Exception as error:  # noqa: BLE001 (only one may come, and only from one call)
        if not (op.kind == "flush" and isinstance(error, StorageError)):
            ledger.note("bad", f"{op.kind} raised {error!r}")
        return []
    ledger.note("done", answers)
    with suppress(ValueError):  # the reader of the ledger says it
        model.end(op, answers)
    return list(answers)


def read(store: StorageBackend, op: Op, ledger: Ledger) -> None:
    """A get: what is a hit has the right bytes."""
    items = [to_get(key(v.name), len(v.data)) for v in op.versions]
    try:
        answers = store.get(items)
    except Exception as error:  # noqa: BLE001 (none may come)
        ledger.note("bad", f"get raised {error!r}")
        return
    for version, item, answer in zip(op.versions, items, answers, strict=True):
        if answer is Outcome.HIT and content(item) != version.data:
            ledger.note("bad", f"wrong bytes of {version.name}")


def listing(store: StorageBackend, ledger: Ledger) -> None:
    """The calls that may refuse with StorageError, and those that may not."""
    calls: dict[str, Callable[[], object]] = {
        "scan": lambda: list(store.scan_all()),
        "describe": lambda: store.describe([key(0)]),
        "namespaces": store.namespaces,
        "usage": store.usage,
        "exists": lambda: store.exists([key(0), key(1)]),
        "register_namespace": lambda: store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"})),
    }
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 (the ledger says which may not be)
            if not isinstance(error, StorageError) or name in ("exists", "register_namespace"):
                ledger.note("bad", f"{name} raised {error!r}")
