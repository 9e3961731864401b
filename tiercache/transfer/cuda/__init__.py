"""Copies between a CUDA device and the host arena.

Reading order: `device` (what is asked of CUDA), `copying` (the methods), `ticket`, `lane` (a direction), `proof`, `calibration`, `kept`
(in a file), `watch` (is it still right?), `locked` (the arena), `engine`; `hardware` is the real device.
"""

from tiercache.transfer.cuda.calibration import Calibration, Cell, calibrate
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.cuda.engine import CudaEngine
from tiercache.transfer.cuda.hardware import CupyDevice
from tiercache.transfer.cuda.kept import calibrated, calibration_directory, read_calibration

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
    "calibrated",
    "calibration_directory",
    "read_calibration",
]
