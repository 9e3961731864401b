"""Copies between a CUDA device and the host arena.

Reading order: `device` (the interface to CUDA), `copying` (the methods), `ticket`, `lane` (one direction), `proof` (the trial of the
methods), `calibration` (their speeds), `kept` (calibrations in files), `watch` (whether a calibration still holds), `locked` (the
page-locked arena), `engine`; `hardware` is the real device.
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
