"""Reading of a master over HTTP: the names of all objects, and the bytes of the pool."""

from __future__ import annotations

import http.client
import re
from typing import Final, NamedTuple

from tiercache.config.addresses import Address
from tiercache.errors import UnavailableError

_MAX_ANSWER: Final = 1 << 30
"""Maximum number of bytes of an answer: some seven million names."""
_GAUGE: Final = re.compile(r"^(master_\w+)(?:\{\})? ([0-9.e+]+)$", re.MULTILINE)


class PoolBytes(NamedTuple):
    """Bytes of all hosts of the pool together, and the number of objects of all its users."""

    used: int
    capacity: int
    objects: int


class Listing:
    """The HTTP side of a master.

    Thread safety: stateless; share it freely.
    """

    def __init__(self, address: Address, deadline: float) -> None:
        """Ask the master at `address`; an answer may take `deadline` seconds between two packets."""
        self._address: Final = address
        self._deadline: Final = deadline

    def names(self) -> list[str]:
        """Return the names of all objects of the master; raises UnavailableError."""
        return self._ask("/get_all_keys").split("\n")

    def pool(self) -> PoolBytes:
        """Return the figures of the pool; raises UnavailableError."""
        gauges = {name: int(float(value)) for name, value in _GAUGE.findall(self._ask("/metrics"))}
        return PoolBytes(
            gauges.get("master_allocated_bytes", 0),
            gauges.get("master_total_capacity_bytes", 0),
            gauges.get("master_key_count", 0),
        )

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection(
            self._address.host, self._address.port, timeout=self._deadline
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"the master does not serve http={self._address} ({error}); give the -metrics_host and"
                " -metrics_port of mooncake_master, or omit http"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK or len(body) > _MAX_ANSWER:
            raise UnavailableError(
                f"http://{self._address}{path} answers {answer.status} and {len(body)} bytes; is that the"
                " metrics port of mooncake_master?"
            )
        return body.decode("utf-8", "replace")
