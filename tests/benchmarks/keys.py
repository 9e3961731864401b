"""Cost of the key chain. One JSON line: `python -m tests.benchmarks.keys`."""

import json
import statistics
import time

import numpy as np
from blake3 import blake3

from tiercache.keys import page_keys

PAGES = 512


def main() -> None:
    """Chain 32k tokens of 64-token pages; beside it one BLAKE3 pass over the same bytes, which chaining can
    never beat.
    """
    tokens = np.arange(PAGES * 64, dtype=np.uint64)
    chained, plain = [], []
    for _ in range(9):
        started = time.perf_counter()
        page_keys(bytes(32), tokens, 64)
        chained.append(time.perf_counter() - started)
        started = time.perf_counter()
        blake3(tokens.view(np.uint8).data).digest()
        plain.append(time.perf_counter() - started)
    us = statistics.median(chained) / PAGES * 1e6
    limit = statistics.median(plain) / PAGES * 1e6
    print(json.dumps({"name": "page_key", "us": round(us, 3), "limit_us": round(limit, 3), "target_us": 2.0}))


if __name__ == "__main__":
    main()
