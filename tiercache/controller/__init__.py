"""The controller, which joins index, transfer and storage.

Principles:

1. The engine's thread decides everything; other threads move bytes, and post events that its calls apply.
2. Room is reserved before anything moves; where there is none, nothing has changed.
3. A restore is whole and verified up to its depth, or the next depth below is tried.
4. A hung store costs one deadline, then nothing until a probe finds that it answers again.
5. Whatever is under way pins what it uses, also beyond the end of the request that began it.

Unless a class says otherwise, it belongs to the owner's thread (the engine's thread, which calls the
controller), and only its methods named `_background_*` run on others.

`docs/structure.md` describes the life of a request.
"""

from tiercache.controller.admission import Admission
from tiercache.controller.continuation.continued import ResumedAdmission
from tiercache.controller.continuation.parked import Parked, ParkedStatus
from tiercache.controller.controller import EngineFactory, HybridCacheController
from tiercache.controller.lookup import Lookup, Preview
from tiercache.controller.options import WRITE_BACK, WRITE_CHANCE, WRITE_THROUGH, ControllerOptions
from tiercache.controller.prefetch import PrefetchTicket
from tiercache.controller.ranks import RankGroup
from tiercache.controller.restore import Sources
from tiercache.controller.waiting import Poll, Status
from tiercache.threads import IoThreads

__all__ = [
    "WRITE_BACK", "WRITE_CHANCE", "WRITE_THROUGH", "Admission", "ControllerOptions", "EngineFactory",
    "HybridCacheController", "IoThreads", "Lookup", "Parked", "ParkedStatus", "Poll", "PrefetchTicket",
    "Preview", "RankGroup", "ResumedAdmission", "Sources", "Status",
]  # fmt: skip
