"""Hits of SGLang's own tree and of ours under the same random requests, in real servers: an experiment.

python -m tests.servers.sglang.drive ENGINES_FOLDER MODEL REQUESTS [NAME ...]
Names: sglang (its own tree), and policies of tiercache. One JSON line each, with the number of answers
that differ from the first's.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.processes import free_port
from tests.servers.models import make_model
from tests.servers.sglang.server import SglangServer


def requests(count: int, seed: int = 11) -> Iterator[tuple[int, list[int]]]:
    """Yield (conversation, new tokens): shared prefixes among one-off prompts and conversations.

    A conversation goes on behind its last answer; -1 is a prompt of its own.
    """
    draw = random.Random(seed)
    shared = [[draw.randrange(3, 250) for _ in range(draw.choice([500, 900, 1400]))] for _ in range(6)]
    weights = [1 / (n + 1) for n in range(len(shared))]
    for _ in range(count):
        kind, fresh = draw.random(), [draw.randrange(3, 250) for _ in range(draw.randrange(80, 400))]
        if kind < 0.4:
            yield -1, draw.choices(shared, weights)[0] + fresh
        elif kind < 0.65:
            yield -1, [draw.randrange(3, 250) for _ in range(draw.randrange(300, 1500))]
        else:
            yield draw.randrange(12), fresh


def main(engines: str, model: str, count: str, *names: str) -> None:
    """Ask each server in turn, and print its share of cached prompt tokens."""
    expected: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(model, Path(folder))
        for name in names or ("sglang", "lru", "hvd"):
            policy = json.dumps({"policy": name})
            arguments = [
                "--radix-cache-backend",
                "tiercache",
                "--hicache-storage-backend-extra-config",
                policy,
            ]
            if name == "sglang":
                arguments = ["--radix-eviction-policy", "lru"]
            log = Path(folder, f"{name}.log")
            with SglangServer(Path(engines, "sglang"), path, free_port(), log, None, *arguments) as server:
                talks: dict[int, list[int]] = {}
                asked = cached = different = 0
                began = time.monotonic()
                for n, (talk, fresh) in enumerate(requests(int(count))):
                    prompt = [*talks.get(talk, []), *fresh] if talk >= 0 else fresh
                    answer = server.ask(prompt, 8)
                    if talk >= 0:  # it begins anew when it no longer fits
                        talks[talk] = [] if len(prompt) > 2400 else [*prompt, *answer.tokens]
                    asked, cached = asked + len(prompt), cached + answer.cached
                    if len(expected) > n:
                        different += answer.tokens != expected[n]
                    else:
                        expected.append(answer.tokens)
                row = {
                    "model": model,
                    "tree": name,
                    "requests": int(count),
                    "tokens": asked,
                    "cached": cached,
                }
                row |= {"share": round(cached / asked, 4), "other_answers": different}
                print(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
