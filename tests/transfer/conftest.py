from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.machines import Machine, Real, Simulated
from tests.transfer.rigs import Rig, cpu_engine, on_cpu, rig_on
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.transfer import TransferEngine

MACHINES = ["simulated", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Simulated(jitter=0.0005) if request.param == "simulated" else Real()


@pytest.fixture
def rig(machine: Machine) -> Iterator[Rig]:
    rig = rig_on(machine)
    yield rig
    rig.arena.close()


@pytest.fixture
def simulated() -> Iterator[tuple[Rig, SimulatedDevice]]:
    machine = Simulated(jitter=0.0005)
    rig = rig_on(machine)
    yield rig, machine.device
    rig.arena.close()


@pytest.fixture(params=["cuda", "copy"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, TransferEngine]]:
    """A rig and an engine, CUDA's on a simulated device or the CPU's, of which nothing is left behind."""
    machine = Simulated()
    rig = rig_on(machine)
    engine: TransferEngine = cpu_engine(on_cpu(rig)) if request.param == "copy" else rig.engine()
    with engine:
        yield rig, engine
    rig.arena.close()
    assert machine.device.leftovers.keys() <= {"streams", "events"}, "those of the test"
