"""Everything that can be wrong with a store's directory when it is opened, made on purpose, and what may be
lost by it.

A `Template` is a store with some objects and a record of where each of them lies. A `Damage` spoils a copy of
its directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tiercache_backends.file.records import RECORD, RECORD_BYTES

from tests.campaign.model import Model, Op, Version, perform
from tests.campaign.stores import Subject
from tests.storage.backends import locate
from tests.storage_backends.lmdb.hooks import page_kinds
from tiercache.core import Outcome
from tiercache.testing.objects import key

PAGE = 4096
NAMES = 120
CAPACITY = 16 << 20
FILES = {"file": "catalog/000001.log", "lmdb": "database/data.mdb"}
WITH_OBJECTS = ("objects", "parts")
"""Trees whose leaves hold what cannot be had from elsewhere; all others could be made anew."""


@dataclass(frozen=True)
class Template:
    """Two copies of one store: as a process leaves it that was killed, and as one that closed it.

    `slabs`: of `file`, the names and ends of the objects in each slab file, by its name. `pages`: roles of
    LMDB's pages, and the names of the objects that lie on them. `records`, in LMDB's file: name, offset and
    bytes.
    """

    kind: str
    running: Path
    closed: Path
    model: Model
    slabs: Mapping[str, list[tuple[int, int]]]
    pages: Mapping[int, tuple[str, frozenset[int]]]
    records: list[tuple[int, int, int]]

    @property
    def subject(self) -> Subject:
        return Subject(self.kind, self.running, CAPACITY)

    def copy(self, target: Path, *, closed: bool) -> Subject:
        """A store of one's own to spoil."""
        shutil.copytree(self.closed if closed else self.running, target, symlinks=True)
        return self.subject.at(target)

    def data(self, path: Path) -> Path:
        """The catalog's log, or LMDB's file, of a copy."""
        return path / FILES[self.kind]


def template(kind: str, directory: Path) -> Template:
    """Make a store, and note where everything lies."""
    subject = Subject(kind, directory / "store", CAPACITY)
    model = Model()
    slabs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with subject.open() as store:
        for start in range(0, NAMES, 4):
            op = Op("set", [Version(name, 1) for name in range(start, start + 4)])
            model.begin(op)
            model.end(op, answers := perform(store, op))
            assert set(answers) == {Outcome.STORED}, answers
        store.flush()
        for name in range(NAMES):
            for path, offset, length in locate(store, key(name)) if kind == "file" else ():
                slabs[os.path.basename(path)].append((name, offset + length))
        shutil.copytree(subject.path, directory / "running")
    shutil.copytree(subject.path, directory / "closed")
    made = Template(kind, directory / "running", directory / "closed", model, slabs, {}, [])
    pages, records = _lies(kind, made.data(directory / "running"))
    return Template(kind, made.running, made.closed, model, slabs, pages, records)


def _lies(kind: str, path: Path) -> tuple[dict[int, tuple[str, frozenset[int]]], list[tuple[int, int, int]]]:
    """Return the contents of the pages in use, and the positions of the records.

    By page number: the role of the page and, in `file`, the names of the objects on it. Of each record: the
    object's name, the offset in the file and the size in bytes.
    """
    data = path.read_bytes()
    digests = {name: key(name).digest for name in range(NAMES)}
    records: list[tuple[int, int, int]] = []
    on: dict[int, set[int]] = defaultdict(set)
    if kind == "file":
        for name, digest in digests.items():
            start = data.index(digest) - RECORD.fields["digest"][1]  # type: ignore[index]
            records.append((name, start, RECORD_BYTES))
            for page in {start // PAGE, (start + RECORD_BYTES - 1) // PAGE}:
                on[page].add(name)
        return {page: ("objects leaf", frozenset(names)) for page, names in on.items()}, records
    kinds = page_kinds(str(path))
    for page in kinds["objects leaf"]:
        # The head of a page says where its nodes begin; what was removed may still lie before them.
        nodes = page * PAGE + int.from_bytes(data[page * PAGE + 14 : page * PAGE + 16], "little")
        for name, digest in digests.items():
            # In `lmdb` a record is the value behind its key, and the node's head in front of that begins with
            # its size.
            at = data.find(digest, nodes, (page + 1) * PAGE)
            if at >= 0:
                records.append((name, at + 64, int.from_bytes(data[at - 8 : at - 6], "little")))
    return {page: (kind, frozenset()) for kind, pages in kinds.items() for page in pages}, records


@dataclass(frozen=True)
class Spoiled:
    """Consequences of a damage.

    `loses`: the names that may be lost by it (None: as many as an uninterrupted opening loses). `undo`: takes
    it back.
    """

    loses: frozenset[int] | None = frozenset()
    undo: Callable[[], None] = lambda: None
    kept: Callable[[], bool] = lambda: True
    """Tells whether what the store puts aside is still there."""


Damage = Callable[[Template, Path, Random], Spoiled]


def nothing(_template: Template, _path: Path, _random: Random) -> Spoiled:
    """A sound store."""
    return Spoiled()


def record(template: Template, path: Path, random: Random) -> Spoiled:
    """One flipped bit in the record of an object; in `lmdb` behind its number and length."""
    name, offset, size = random.choice(template.records)
    _flip(template.data(path), offset + random.randrange(24 if template.kind == "lmdb" else 0, size), random)
    return Spoiled(frozenset({name}))


def object_page(template: Template, path: Path, random: Random) -> Spoiled:
    """A page of zeros in the place of one that says something of objects, or holds a part of one."""
    return _zero(
        template, path, random, lambda role: role.partition(" ")[0] in WITH_OBJECTS and "branch" not in role
    )


def other_page(template: Template, path: Path, random: Random) -> Spoiled:
    """A page of zeros in the place of any other one in use: a branch, a list of free pages, a meta page."""
    spoiled = _zero(
        template, path, random, lambda role: role.partition(" ")[0] not in WITH_OBJECTS or "branch" in role
    )
    return Spoiled(None, spoiled.undo)


def suspect(_template: Template, path: Path, _random: Random) -> Spoiled:
    """The last owner has written down that it does not trust the catalog."""
    return _edit(path / "state", suspect=True)


def useless_state(_template: Template, path: Path, random: Random) -> Spoiled:
    """The file that says how the last owner left is missing, empty or garbage."""
    (path / "state").unlink()
    if left := random.choice((None, b"", b"\xff" * 64, b"[]")):
        (path / "state").write_bytes(left)
    return Spoiled()


def missing_format(_template: Template, path: Path, _random: Random) -> Spoiled:
    """The file that names the kind of store is gone: what it was made with must not be taken for nothing."""
    (path / "format").unlink()
    return Spoiled()


def leftovers(template: Template, path: Path, random: Random) -> Spoiled:
    """Half of what an earlier opening was writing beside the real files when it was killed."""
    for name in ("state.new", "format.new"):
        (path / name).write_bytes(random.randbytes(40))
    database = template.data(path).parent
    for suffix in (".new", ".damaged"):
        database.with_name(database.name + suffix).mkdir(exist_ok=True)
        (database.with_name(database.name + suffix) / "data.mdb").write_bytes(random.randbytes(3 * PAGE))
    (database / "new.log").write_bytes(random.randbytes(40))
    return Spoiled()


def missing_slab(template: Template, path: Path, random: Random) -> Spoiled:
    """One slab is gone."""
    slab = random.choice(sorted(template.slabs))
    (path / "slabs" / slab).unlink()
    return Spoiled(frozenset(name for name, _ in template.slabs[slab]))


def short_slab(template: Template, path: Path, random: Random) -> Spoiled:
    """One slab is cut."""
    slab = random.choice(sorted(template.slabs))
    file = path / "slabs" / slab
    left = random.randrange(file.stat().st_size)
    os.truncate(file, left)
    return Spoiled(frozenset(name for name, end in template.slabs[slab] if end > left))


def missing_data(template: Template, path: Path, _random: Random) -> Spoiled:
    """The log or LMDB's file is gone, and with it all that was known."""
    template.data(path).unlink()
    return Spoiled(frozenset(range(NAMES)))


def short_data(template: Template, path: Path, random: Random) -> Spoiled:
    """The log or LMDB's file is cut somewhere behind its first pages."""
    data = template.data(path)
    used = (max(template.pages) + 1) * PAGE
    os.truncate(data, random.randrange(2 * PAGE, used))
    return Spoiled(None)


def newer_format(_template: Template, path: Path, _random: Random) -> Spoiled:
    """A later version made it: it is refused, and stays as it is for who can read it."""
    before = (path / "format").read_bytes()
    _edit(path / "format", version=99)
    return Spoiled(undo=lambda: (path / "format").write_bytes(before) and None)


def older_format(template: Template, path: Path, _random: Random) -> Spoiled:
    """An earlier version made it: its database is put aside, and must be there afterwards."""
    _edit(path / "format", version=0)
    before = template.data(path).read_bytes()
    size = (max(template.pages) + 1) * PAGE

    def kept() -> bool:
        name = template.data(path).name
        return any(file.read_bytes()[:size] == before[:size] for file in path.rglob(name))

    # What `lmdb` puts aside holds the payloads, and makes room for new ones where it is large.
    return Spoiled(frozenset(range(NAMES)), kept=kept if template.kind == "file" else lambda: True)


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "nothing": (nothing, ("file", "lmdb")), "record": (record, ("file", "lmdb")),
    "page with objects": (object_page, ("file", "lmdb")), "other page": (other_page, ("lmdb",)),
    "suspect": (suspect, ("lmdb",)), "useless state": (useless_state, ("file", "lmdb")),
    "missing format": (missing_format, ("file", "lmdb")), "leftovers": (leftovers, ("file", "lmdb")),
    "missing slab": (missing_slab, ("file",)), "short slab": (short_slab, ("file",)),
    "missing database": (missing_data, ("file", "lmdb")), "short database": (short_data, ("file", "lmdb")),
    "newer format": (newer_format, ("file", "lmdb")), "older format": (older_format, ("file", "lmdb")),
}  # fmt: skip
"""Each with the kinds of store that know it."""

UNSEEN = (record, object_page, other_page)
"""Damages that an opening of `lmdb` may not see, so that its databases may disagree until one is met."""
EMPTYING = (*UNSEEN, suspect, short_data)
"""Damages for which `lmdb` starts empty."""


def _zero(template: Template, path: Path, random: Random, which: Callable[[str], bool]) -> Spoiled:
    """By role first, so that rare ones come as often as common ones."""
    roles = sorted({role for role, _ in template.pages.values() if which(role)})
    role = random.choice(roles)
    number = random.choice(sorted(n for n, (its, _) in template.pages.items() if its == role))
    with template.data(path).open("r+b") as file:
        file.seek(number * PAGE)
        file.write(bytes(PAGE))
    return Spoiled(template.pages[number][1])


def _flip(path: Path, offset: int, random: Random) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def _edit(path: Path, **more: object) -> Spoiled:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return Spoiled()
