"""Copies between device pools and the host arena."""

from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine
from tiercache.transfer.copy import Copier, CopyEngine
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
    "join_descriptors",
]
