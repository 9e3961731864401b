"""Machines whose times a replay models: their speeds, and the files that describe them."""

from tiercache_lab.replay.machines.base import ReplayMachine, Speed
from tiercache_lab.replay.machines.files import MACHINES, machine_named

__all__ = ["MACHINES", "ReplayMachine", "Speed", "machine_named"]
