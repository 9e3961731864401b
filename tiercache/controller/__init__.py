"""The controller, which joins index, transfer and storage. `docs/structure.md` describes the life of a request."""

from tiercache.controller.accounting import Sources
from tiercache.controller.admission import Admission, Poll, Status
from tiercache.controller.controller import EngineFactory, HybridCacheController
from tiercache.controller.io_threads import IoThreads
from tiercache.controller.lookup import Lookup
from tiercache.controller.state import ControllerOptions

__all__ = ["Admission", "ControllerOptions", "EngineFactory", "HybridCacheController", "IoThreads", "Lookup", "Poll", "Sources", "Status"]
