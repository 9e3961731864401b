"""The slowdown of matrix products by copies beside them: copy engines should cause none, a kernel occupies multiprocessors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

from tiercache.cli.bench.device.bed import Bed
from tiercache.cli.bench.device.ground import Ground, Mover, Say, Work
from tiercache.cli.bench.device.plan import Case, Objects, Plan
from tiercache.cli.bench.device.products import MakeProducts, count_for, run_products
from tiercache.cli.bench.device.rows import MatmulRow, SkippedRow
from tiercache.cli.bench.rows import MIB
from tiercache.cli.bench.timing import Side, medians
from tiercache.errors import ConfigError
from tiercache.transfer.cuda import CudaDevice, Direction, Method

_WIDTH: Final = 8192
"""Width of the matrices: one product takes about 1.5 ms on an H100, beside which the cost of its launch is negligible."""
_BYTES: Final = 256 * MIB
"""Bytes of one turn of the copy loop, so many that the pause between two turns counts for little."""
_SAMPLE: Final = 3
"""Products that are timed to choose the number of products of a run."""
_ALONE: Final = "alone"


def matmul(plan: Plan, ground: Ground, methods: Sequence[Method], make: MakeProducts, say: Say) -> Iterator[MatmulRow | SkippedRow]:
    """Yield a row for each method and direction; or one row with the reason if no products can be computed."""
    shapes, device = plan.models[0], ground.device
    with ExitStack() as stack:
        try:
            products = stack.enter_context(closing(make(device, _WIDTH)))
        except ConfigError as error:
            yield SkippedRow(Case.MATMUL, str(error))
            return
        objects = Objects(pages=max(1, min(plan.most, _BYTES) // shapes.pages.nbytes))
        bed = Bed(ground, shapes, objects, stack)
        count = count_for(device, products, plan.compute_seconds, _SAMPLE)
        loops = {
            (method, direction): CopyLoop(device, bed.work(direction, objects), method) for method in methods for direction in Direction
        }
        sides = [Side(_ALONE, lambda _: run_products(device, products, count))]
        for (method, direction), loop in loops.items():
            stack.callback(loop.stop)
            sides.append(
                Side(f"{method} {direction}", lambda _: run_products(device, products, count), lambda _, loop=loop: loop.start(),  # type: ignore[misc]
                     lambda _, loop=loop: loop.stop())  # type: ignore[misc]
            )  # fmt: skip
        say("matrix products, alone and beside copies")
        found = medians(sides, plan.repeats)
        for (method, direction), loop in loops.items():
            yield MatmulRow(method, direction, count, found[_ALONE], found[f"{method} {direction}"], loop.gb_s)


class CopyLoop:
    """A thread that repeats the same copies between `start` and `stop`.

    Thread safety: one thread may call `start` and `stop`; `stop` raises the error that the copies raised.
    """

    def __init__(self, device: CudaDevice, work: Work, method: Method) -> None:
        self._device, self._work, self._methods = device, work, [method] * len(work.groups)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._nbytes, self._seconds = 0, 0.0

    @property
    def gb_s(self) -> float:
        """Speed of the copies in 10**9 bytes per second, over all runs of the loop."""
        return self._nbytes / self._seconds / 1e9 if self._seconds else 0.0

    def start(self) -> None:
        """Start the thread and return after its first turn, so that copies are certainly under way."""
        self._stop.clear()
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), name="bench-copies", daemon=True)
        self._thread.start()
        begun.wait()

    def stop(self) -> None:
        """Stop the thread and return when no copy is under way; raises the error of the copies. A second call has no effect."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, begun: threading.Event) -> None:
        try:
            self._device.activate()
            with closing(Mover(self._device)) as mover:
                mover.move(self._work, self._methods)
                begun.set()
                started = time.perf_counter()
                while not self._stop.is_set():
                    mover.move(self._work, self._methods)
                    self._nbytes += self._work.copies.nbytes
                self._seconds += time.perf_counter() - started
        except Exception as error:  # noqa: BLE001  it is raised by `stop`
            self._error = error
        finally:
            begun.set()
