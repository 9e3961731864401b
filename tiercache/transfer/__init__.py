"""Copies between device pools and the host arena."""

from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine
from tiercache.transfer.copy import Copier, CopyEngine
from tiercache.transfer.descriptors import Descriptors, build_descriptors, join_descriptors
from tiercache.transfer.engines import engine_for

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
