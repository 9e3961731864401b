"""Replay of a fleet: requests that a router sends to one of several workers, each with a cache of its own.

    python -m tiercache_lab.replay.fleet SOURCE PROFILE HOST_BYTES REQUESTS_PER_SECOND WORKERS REQUESTS

A worker computes one prefill after the other; routers see at once what it has been sent. One JSON line each:
hit rate of tokens, mean and 95th percentile of the time to the first token in ms, and both gains over taking
turns, as shares of the oracle's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tiercache.policy import profile_named
from tiercache.text import parse_size
from tiercache_lab.replay.base import Request, Tiers
from tiercache_lab.replay.cache import Setup, SimulatedCache
from tiercache_lab.replay.drive import Tally
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.sources.catalogue import open_source

SAVED = 0.95  # part of a token's computation that a restore from the host saves, as in examples/router.py


class Worker(SimulatedCache):
    """Worker that is free at the time `free`; `jobs` has ends and tokens to compute of what it was sent."""

    free = 0.0
    jobs: Sequence[tuple[float, float]] = ()

    def depths(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of a prompt can be restored, and how many have their pages."""
        match, size = self.controller.lent.index.match(request.prompt), self.controller.page_size
        return match.depth * size, match.path_depth * size

    def seconds(self, request: Request, depth: int) -> float:
        """Return the time to the first token of a request that comes now and is restored to a depth."""
        profile, machine = self._setup.profile, self._setup.machine
        nbytes = profile.kv_bytes_per_token * depth + profile.state_bytes * bool(depth)
        flops = profile.flops(depth, len(request.prompt))
        waiting = max(0.0, self.free - request.arrival)
        return waiting + nbytes / machine.host_bandwidth + flops / machine.flops

    def tokens(self, request: Request) -> float:
        """Return how many tokens there are to compute, of requests under way and of this one."""
        self.jobs = [job for job in self.jobs if job[0] > request.arrival]
        return sum(left for _, left in self.jobs) + len(request.prompt) - SAVED * self.depths(request)[0]

    def serve(self, request: Request, tally: Tally) -> None:
        """Serve a request behind those that wait, and count it."""
        left = len(request.prompt) - SAVED * self.depths(request)[0]
        self.now = max(self.now, self.free, request.arrival)
        begun = self.begin(request)
        seconds = self.seconds(request, begun.admission.depth)
        tally.add(request, begun.admission.depth, seconds)
        self.end(begun)
        self.free = request.arrival + seconds
        self.jobs = [*self.jobs, (self.free, left)]


def llm_d(workers: Sequence[Worker], request: Request) -> Worker:
    """llm-d: 3 for pages of the prefix, 2 for a short queue; it knows no states, and no device caches."""
    pages = [one.depths(request)[1] for one in workers]
    queues = [sum(end > request.arrival for end, _ in one.jobs) for one in workers]
    spans = max(pages) - min(pages) or 1, max(queues) - min(queues) or 1
    scores = [3 * (p - min(pages)) / spans[0] - 2 * q / spans[1] for p, q in zip(pages, queues, strict=True)]
    return workers[scores.index(max(scores))]


def main(spec: str, model: str, host_bytes: str, rate: str, workers: str, requests: str) -> None:
    """Print a row for each router."""
    source, profile = open_source(spec, limit=int(requests)), profile_named(model)
    need, setup = measure(source), Setup("hvd", profile, Tiers(parse_size(host_bytes)))
    tallies = {name: Tally(profile) for name in ("turns", "least loaded", "llm-d", "ours", "oracle")}
    for name, tally in tallies.items():
        fleet = [Worker(source, need, setup, 1) for _ in range(int(workers))]
        for n, given in enumerate(source):
            request = Request(given.prompt, given.output, n / float(rate), given.session)
            match name:
                case "turns":
                    chosen = fleet[n % len(fleet)]
                case "least loaded":
                    chosen = min(fleet, key=lambda one: one.free)
                case "llm-d":
                    chosen = llm_d(fleet, request)
                case "ours":
                    chosen = min(fleet, key=lambda one: one.tokens(request))
                case _:
                    depths = {one: one.depths(request)[0] for one in fleet}
                    chosen = min(fleet, key=lambda one: one.seconds(request, depths[one]))
            chosen.serve(request, tally)
    figures = {name: (tally.token_hit_rate, *tally.ttft_ms()) for name, tally in tallies.items()}
    first, best = figures["turns"], figures["oracle"]
    for name, found in figures.items():
        gains = [(found[n] - first[n]) / (best[n] - first[n]) for n in (0, 1)]
        row = {"router": name, "hits": found[0], "ttft_ms": found[1:], "gains": gains}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
