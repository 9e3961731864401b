"""The daemon's HTTP port for operators: /metrics, /healthz, /readyz and /status.

Read in this order: `port` (connections, on a thread of their own) and `routes` (who asks, and the answers).
"""

from tiercache.errors import MissingExtraError

try:
    from tiercache.daemon.http.port import HttpPort
    from tiercache.daemon.http.routes import Readers, make_app
except ModuleNotFoundError as error:
    raise MissingExtraError("http.listen", "http", error) from error

__all__ = ["HttpPort", "Readers", "make_app"]
