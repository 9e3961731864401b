"""One rank of an SGLang server, as a process: `python rank.py RANK SIZE DIRECTORY URL WORK...`.

Prints one JSON line per piece of work.

write:LAST      back up five pages and the states at pages 2 and LAST
fetch           query all five pages and their state, fetch what hits, and compare every byte
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

import tests.engines.sglang.conftest  # noqa: F401
from tests.engines.sglang import rig

TOKENS = range(rig.PAGE * 5)
STATES = {1: 2, 3: 3}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(rank: int, size: int, directory: Path, url: str, *work: str) -> None:
    """Do the work in order."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=size
    )
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    rig.fill(kv, seed=rank)
    rig.fill(mamba, seed=rank + 100)
    expected = [rig.page(kv, i) for i in range(5)], {at: rig.page(mamba, slot) for at, slot in STATES.items()}
    with rig.on_a_cpu(rank, size):
        made = rig.controller(kv, mamba, torch.distributed.group.WORLD)
        rig.attach(made, url)
        key, hashes = rig.hashed(TOKENS)
        for step in work:
            verb, _, argument = step.partition(":")
            if verb == "write":
                states = {at: slot for at, slot in STATES.items() if at <= int(argument)}
                say(written=rig.write(made, TOKENS, hashes, range(5), states).completed_tokens)
            elif verb == "fetch":
                say(**_fetch(made, key, kv, mamba, expected))
            torch.distributed.barrier()
        made.detach_storage_backend()
    torch.distributed.destroy_process_group()


def _fetch(made: Any, key: Any, kv: Any, mamba: Any, expected: Any) -> dict[str, Any]:
    found = rig.query(made, key, rig.any_state())
    pages = found.storage_hit_count // rig.PAGE
    if not pages:
        return {"hit": 0}
    found.pool_transfers[0].host_indices = torch.tensor([9])
    tokens, hits = rig.fetch(made, found, range(10, 10 + pages))
    right = [rig.page(kv, 10 + i) == expected[0][i] for i in range(pages)]
    return {
        "hit": pages,
        "tokens": tokens,
        "states": hits["mamba"],
        "right": all(right) and rig.page(mamba, 9) == expected[1][pages - 1],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
