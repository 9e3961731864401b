"""Power cuts of a real file system: ext4 in an image, mounted through a loop device, copied while its writer
is stopped.

What the kernel has not written back yet is in the page cache of the mounted file system and not in the image:
that is what the cut loses. The copy is taken between two looks at the loop device's counters; where a write
came in between (the journal, the write-back), it is taken again. ext4 then replays the copy's journal. A
drive that reorders what it has in its own cache is not seen here; `clones` does that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.actors import Part
from tests.campaign.model import Ledger, Model, Verdict, judge
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject, check_integrity
from tests.campaign.victims import Nursery

IMAGE_BYTES = 64 << 20
CAPACITY = 24 << 20
WORK_SECONDS = 0.7
ROOMY, EVICTING = 120, 1500
"""Names: some 3 MB of objects, or more than fit."""


def unfit() -> str:
    """Why there can be no power cuts here; empty where there can."""
    if os.geteuid() != 0:
        return "mounting takes root"
    if missing := [name for name in ("mkfs.ext4", "mount", "umount", "cp") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found"
    if not os.path.exists("/dev/loop-control"):
        return "no loop devices"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with mounted(new_image(Path(directory) / "image"), Path(directory) / "there"):
                return ""
        except subprocess.CalledProcessError as error:
            return f"{error.cmd[0]} refused: {error.stderr.strip()}"


def campaign(run: Run) -> Iterator[Row]:
    """Half of the cuts with everything kept that was acknowledged, half with only what was flushed.

    A third kind, in which nothing is ever flushed, shows that the cuts do cut: what they take is under "torn
    found", or just absent.
    """
    if why := unfit():
        yield Row("power", run.kind, skipped=f"skipped: {why}")
        return
    half, few = run.trials // 2, max(1, run.trials // 5)
    with Nursery() as nursery:
        for durability, flushes, count in (
            ("power", True, run.trials - half),
            ("process", True, half),
            ("process", False, few),
        ):
            name = f"{run.kind} {durability}"
            row = Row("power", name if flushes else f"{name}, never flushed")
            cut = partial(Cut, nursery, row, run.kind, durability, flushes)
            yield run.row(row, lambda seed, at, cut=cut: cut(Random(seed)).run(at), run.seeds[:count])


class Cut:
    """One file system, one writer, one power cut, one thread."""

    def __init__(
        self, nursery: Nursery, row: Row, kind: str, durability: str, flushes: bool, random: Random
    ) -> None:
        self._nursery, self._row, self._kind, self._durability = nursery, row, kind, durability
        self._flushes, self._random = flushes, random
        self._names = random.choice((ROOMY, EVICTING))

    def run(self, directory: Path) -> Verdict:
        """Let a writer work, cut, and look at the copy, in a directory on a real disk."""
        return self._look(directory, self._cut(directory))

    def _cut(self, directory: Path) -> Model:
        """`directory/left` is the image after the cut; returns what was acknowledged."""
        with mounted(new_image(directory / "image"), directory / "before") as (mount, device):
            model, ledger = Model(), str(directory / "ledger")
            subject = Subject(self._kind, mount / "store", CAPACITY, self._durability)
            order = Part(
                "write", subject.fields, self._names, model.to_json(), ledger=ledger,
                seed=self._random.getrandbits(32), evicts=True, flushes=self._flushes,
            )  # fmt: skip
            self._nursery.judges = False
            self._nursery.start(order)
            try:
                self._nursery.live(self._random, WORK_SECONDS / 2)
                if self._random.random() < 0.3:
                    _call("sync", "-f", str(mount))  # the write-back, which comes when it likes
                self._nursery.live(self._random, WORK_SECONDS / 2)
                self._nursery.stop()
                again = copy_still(directory / "image", directory / "left", device)
                self._row.count({"copied again": again})
            finally:
                self._nursery.kill()
        complaints = Ledger.replay(ledger, model)
        if complaints:
            raise AssertionError(complaints)
        return model

    def _look(self, directory: Path, model: Model) -> Verdict:
        """Mount the copy, open the store there, compare."""
        verdict = Verdict()
        with mounted(directory / "left", directory / "after") as (mount, _):
            subject = Subject(self._kind, mount / "store", CAPACITY, self._durability)
            must = model.certain() if subject.keeps_all else model.durable()
            if self._names == EVICTING:
                must &= model.newest(12)
            with subject.recover(self._names, verdict) as store:
                reverts = not subject.keeps_all
                verdict.add(found := judge(store, model, must, self._names, reverts=reverts))
                check_integrity(store)
            gone = sum(found.found.get(v.name) != v.turn for v in model.certain())
            figures = {"acknowledged": len(model.certain()), "demanded": len(must)}
            self._row.count(figures | {"acknowledged and gone": gone})
        return verdict


def new_image(path: Path) -> Path:
    """An empty ext4 file system in a file; nothing of it is made later in the background."""
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    options = "-q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    _call("mkfs.ext4", *options.split(), str(path))
    return path


@contextmanager
def mounted(image: Path, mount: Path) -> Iterator[tuple[Path, str]]:
    """Mount an image for the length of the block: where, and the name of its loop device."""
    mount.mkdir()
    try:
        _call("mount", "-o", "loop", str(image), str(mount))
        yield mount, _device(mount)
    finally:
        if os.path.ismount(mount):
            unmount(mount)


def unmount(mount: Path) -> None:
    """Take it away; a process that was just killed may hold it for a moment."""
    for _ in range(200):
        if subprocess.run(["umount", str(mount)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.02)
    _call("umount", "-l", str(mount))


def _device(mount: Path) -> str:
    [source] = [
        line.split()[0]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[1] == str(mount)
    ]
    return os.path.basename(source)


def copy_still(image: Path, copy: Path, device: str) -> int:
    """Copy the image at an instant without writes; returns how many copies had to be thrown away."""
    for again in range(100):
        before = _writes(device)
        _call("cp", "--sparse=always", str(image), str(copy))
        after = _writes(device)
        if before == after and before[1] == 0:
            return again
    raise RuntimeError(f"{device} never rested")


def _writes(device: str) -> tuple[int, int]:
    """Writes that a block device has completed, and requests in flight."""
    fields = Path(f"/sys/block/{device}/stat").read_text().split()
    return int(fields[4]), int(fields[8])


def _call(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True)
