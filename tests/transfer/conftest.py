from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.machines import Machine, Real, Simulated
from tests.transfer.rigs import Rig, rig_on
from tests.transfer.simulated_cuda import SimulatedDevice

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
