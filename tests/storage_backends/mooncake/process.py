"""A master or a provider of memory, as a process that dies with the one that started it.

python -m tests.storage_backends.mooncake.process master ARGUMENT...
python -m tests.storage_backends.mooncake.process provider HOST MASTER BYTES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Event


def main(kind: str, *arguments: str) -> None:
    import mooncake

    if kind == "master":
        binary = str(Path(mooncake.__file__ or "").with_name("mooncake_master"))
        os.execv(binary, [binary, *arguments])
    from mooncake.store import MooncakeDistributedStore

    host, master, nbytes = arguments
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", int(nbytes), 1 << 24, "tcp", "", master)
    print("ready" if code == 0 else code, flush=True)
    Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
