"""Restores from another host, beside computing the same prompt.

    python -m tests.benchmarks.hosts [--store daemon,file+s3] [--line 0:0,0.001:0,...] [-o FILE.json]

Three hosts in network namespaces (`tests.hosts`): worker 1 computes prompts and stores them, worker 2
computes another, behind whose lookup a bucket is listed, and restores each of them three times, every time
with empty tiers of its own, and computes it each time. A line is DELAY:LOSS, the seconds by which every frame
is delayed each way, and the probability that it is lost. A delay or loss is made by a program
(`tests.hosts.wire`), which takes CPU time from the hosts. With `file+`, worker 2 has a file tier of its own
above the shared store.

Times until the first token are medians over the prompts. `wire` is what the interface of worker 2 received
for one restore, over the payload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.hosts.rig import PAGE_SIZE
from tests.hosts.stores import KINDS, missing
from tests.hosts.three import three_hosts

LINES = ((0.0, 0.0), (0.001, 0.0), (0.005, 0.0), (0.0, 0.01))
TOKENS, PROMPTS, ASKS, LAYERS = 16 * PAGE_SIZE, 4, 3, 12
COLUMNS = (
    "store", "delay", "loss", "hits", "recompute",
    "restore", "gain", "wire", f"restore {ASKS}", "gain", "wire",
)  # fmt: skip


def measure(kind: str, line: tuple[float, float], base: Path) -> dict[str, Any]:
    """Return the figures of one store on one line."""
    with three_hosts(kind, base, LAYERS) as three:
        hosts, workers, desk = three.hosts, three.workers, three.desk
        for worker in workers:
            worker.call("time", prompt=desk.prompt(TOKENS + 1))  # the first passes take longer
        hosts.shape(*line)
        asks: list[list[dict[str, Any]]] = [[] for _ in range(ASKS)]
        for _ in range(PROMPTS):
            prompt = desk.prompt(TOKENS + 1)
            workers[0].call("time", prompt=prompt)
            workers[0].call("flush")
            workers[1].call("time", prompt=desk.prompt(TOKENS + 1))
            for ask in asks:
                before = hosts[1].traffic()[0]
                found = workers[1].call("time", prompt=prompt)
                ask.append(found | {"received": hosts[1].traffic()[0] - before})
                workers[1].call("flush")
    found = [one for ask in asks for one in ask]
    row: dict[str, Any] = {
        "store": kind, "delay": line[0], "loss": line[1],
        "hits": sum(one["hit"] for one in found), "asked": len(found),
        "recompute_ms": 1e3 * statistics.median(one["recompute"] for one in found),
    }  # fmt: skip
    for name, ask in (("first", asks[0]), ("last", asks[-1])):
        payload = sum(one["bytes"] for one in ask)
        row[f"{name}_ms"] = 1e3 * statistics.median(one["ttft"] for one in ask)
        row[f"{name}_gain"] = statistics.median(one["recompute"] / one["ttft"] for one in ask)
        row[f"{name}_wire"] = sum(one["received"] for one in ask) / payload if payload else 0.0
        row[f"{name}_payload_mb"] = payload / len(ask) / 1e6
    return row


def main(arguments: Sequence[str]) -> None:
    """Measure what was asked for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hosts")
    parser.add_argument("--store", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--line", default=",".join(f"{delay}:{loss}" for delay, loss in LINES))
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    rows = []
    table = Table(*COLUMNS, title=f"{TOKENS} tokens; times in ms until the first token")
    for kind in options.store.split(","):
        if reason := missing(kind):
            print(f"{kind} is left out: {reason}", file=sys.stderr)
            continue
        for line in options.line.split(","):
            delay, loss = map(float, line.split(":"))
            with tempfile.TemporaryDirectory() as base:
                row = measure(kind, (delay, loss), Path(base))
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            table.add_row(
                kind, f"{delay * 1e3:g} ms", f"{loss:.0%}", f"{row['hits']}/{row['asked']}",
                f"{row['recompute_ms']:.0f}", f"{row['first_ms']:.0f}", f"{row['first_gain']:.1f}",
                f"{row['first_wire']:.2f}", f"{row['last_ms']:.0f}", f"{row['last_gain']:.1f}",
                f"{row['last_wire']:.2f}",
            )  # fmt: skip
    Console(width=120).print(table)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
