"""Copies between a CUDA device and the host arena.

Reading order: `device` (the interface to CUDA), `copying` (page-locked memory and the methods of copying),
`lane` (one direction), `calibration` (which methods work, and how fast they are), `engine`, `hardware` (the
real device).
"""

from tiercache.transfer.cuda.calibration import Calibration, Cell, calibrate
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.cuda.engine import CudaEngine
from tiercache.transfer.cuda.hardware import CupyDevice

__all__ = [
    "Calibration",
    "Card",
    "Cell",
    "CudaDevice",
    "CudaEngine",
    "CupyDevice",
    "Direction",
    "Method",
    "calibrate",
]
