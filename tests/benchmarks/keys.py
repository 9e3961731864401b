"""Cost of the key chain. One JSON line: `python -m tests.benchmarks.keys`."""

import json

import numpy as np
from blake3 import blake3

from tiercache.keys import page_keys
from tiercache_lab.bench.timing import Side, medians

PAGES = 512


def main() -> None:
    """Chain 32k tokens of 64-token pages, beside one BLAKE3 pass over the same bytes, the least there is."""
    tokens = np.arange(PAGES * 64, dtype=np.uint64)
    sides = (
        Side("chained", lambda _: page_keys(bytes(32), tokens, 64)),
        Side("plain", lambda _: blake3(tokens.view(np.uint8).data).digest()),
    )
    us = {name: seconds / PAGES * 1e6 for name, seconds in medians(sides, 9).items()}
    row = {"name": "page_key", "us": round(us["chained"], 3), "limit_us": round(us["plain"], 3)}
    print(json.dumps(row | {"target_us": 2.0}))


if __name__ == "__main__":
    main()
