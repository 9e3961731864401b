"""Copies between a CUDA device and the host arena.

Reading order: `device` (the interface to CUDA), `copying` (page-locked memory and the methods of copying),
`lane` (one direction), `engine` (and which methods work), `hardware` (the real device).
"""

from tiercache.transfer.cuda.device import Card, CudaDevice, Method
from tiercache.transfer.cuda.engine import CudaEngine
from tiercache.transfer.cuda.hardware import CupyDevice

__all__ = ["Card", "CudaDevice", "CudaEngine", "CupyDevice", "Method"]
