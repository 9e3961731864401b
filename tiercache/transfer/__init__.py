"""Copies between device pools and the host arena."""

from tiercache.transfer.base import LayerTicket, Ticket, TransferEngine
from tiercache.transfer.copy import Copier, CopyEngine, engine_for
from tiercache.transfer.descriptors import Descriptors, build_descriptors, join_descriptors
from tiercache.transfer.fences import Fence

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
