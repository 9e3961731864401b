"""One data-parallel replica of an engine, as a process: `python -m tests.engines.vllm.replica INDEX STORAGE`.

It says `ready`, or the error that it ends with. Then, for each line it reads: `store NAME` and `found NAME`,
answered in one line.
"""

from __future__ import annotations

import sys

from tests.engines.vllm.rig import Engine
from tiercache.errors import TierCacheError


def main(index: str, storage: str) -> None:
    try:
        engine = Engine(
            {"storage": storage, "revision": "r1"}, data_parallel_index=int(index), data_parallel_size=2
        )
    except TierCacheError as error:
        print(f"answer: {type(error).__name__}: {error}", flush=True)
        return
    with engine:
        print("answer: ready", flush=True)
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "store":
                engine.store(name)
            else:
                engine.evict()
            print("answer:", engine.found(name), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
