"""Copies between device pools and the host arena.

Principles:

1. A copy never delays the stream in which the engine computes.
2. No byte is read before it has arrived, and none is overwritten while somebody needs it.
3. A copy that fails fails its own ticket; only the loss of the device fails all.
"""

from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine
from tiercache.transfer.copy import Copier, CopyEngine, engine_for
from tiercache.transfer.descriptors import Descriptors, build_descriptors, join_descriptors

__all__ = [
    "Copier",
    "CopyEngine",
    "Descriptors",
    "Fence",
    "LayerTicket",
    "Ticket",
    "TransferEngine",
    "build_descriptors",
    "engine_for",
    "join_descriptors",
]
