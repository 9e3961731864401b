"""A whole run of `bench device`, on any implementation of CudaDevice."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

from tiercache.cli.bench.device.copying import copies
from tiercache.cli.bench.device.ground import Ground, Say
from tiercache.cli.bench.device.matmul import matmul
from tiercache.cli.bench.device.overlap import overlap
from tiercache.cli.bench.device.plan import Case, Plan
from tiercache.cli.bench.device.products import MakeProducts
from tiercache.cli.bench.device.rows import DeviceRow
from tiercache.cli.bench.device.start import start
from tiercache.cli.bench.rows import Note
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.transfer.cuda import CudaDevice, Method, calibrated
from tiercache.transfer.cuda.proof import prove


def run(plan: Plan, device: CudaDevice, make: MakeProducts, say: Say) -> Generator[DeviceRow | Note]:
    """Yield every row and note as soon as it is known; closing the generator releases everything on the device.

    Raises TransferError if bytes are wrong or the driver fails, ConfigError if this device cannot carry out the plan.
    """
    try:
        with device.current(), ExitStack() as stack:
            yield from _run(plan, device, make, say, stack)
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"{device.card} failed: {error}") from error


def _run(plan: Plan, device: CudaDevice, make: MakeProducts, say: Say, stack: ExitStack) -> Generator[DeviceRow | Note]:
    say("trying each method")
    prove(device)
    methods = _methods(plan, device)
    for method, reason in device.unavailable.items():
        yield Note(f"no copies by {method}: {reason}")
    say("looking for a calibration")
    known, how = calibrated(device)
    yield Note(f"the choice: {how}")
    if Case.START in plan.cases:
        yield from start(plan, device, known, say)
    if plan.cases <= {Case.START}:
        return
    ground = Ground(device, known, plan.device_bytes, stack)
    if Case.COPY in plan.cases:
        yield from copies(plan, ground, methods, say)
    if Case.OVERLAP in plan.cases:
        yield from overlap(plan, ground, make, say)
    if Case.MATMUL in plan.cases:
        yield from matmul(plan, ground, methods, make, say)


def _methods(plan: Plan, device: CudaDevice) -> list[Method]:
    """Return the methods to measure; raises ConfigError if a requested one is not available on the device."""
    for method in plan.methods or ():
        if method in device.unavailable:
            raise ConfigError(f"--method {method} is not possible here: {device.unavailable[method]}")
    return [method for method in Method if method not in device.unavailable and (plan.methods is None or method in plan.methods)]
