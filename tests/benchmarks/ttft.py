"""Predicted beside measured times to the first token: `python -m tests.benchmarks.ttft [ROUNDS]`.

The demo's conversations go through the reference worker with the demo's small model, over tiers as small as
in the demo, one request after the other. Before each round the worker is measured as by `tiercache bench
worker`. The same requests, with the answers that the model gave, then go through a replay with a queue, on
the machine that is the median of all rounds.

There is one JSON line per request (restored tokens, and times in milliseconds; measured is the median of the
rounds), and one with the p50 and p95, and predicted divided by measured. The restored tokens must be equal.
Torch has one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from tiercache.controller import ControllerOptions
from tiercache.core import PoolName
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.bench.worker import WorkerSpeeds, measure_worker
from tiercache_lab.demo.serving import ANSWER_TOKENS, PAGE_SIZE, Conversations, zigzag
from tiercache_lab.demo.small import build_small_hybrid
from tiercache_lab.replay.base import Request, StorageTier, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.queueing.run import QueuedRun, Queueing
from tiercache_lab.replay.queueing.server import Job

CONVERSATIONS, TURNS = 4, 6
DISK = 1 << 30
APART = 1000.0
"""Seconds between the arrivals of two requests, of which the first has long ended."""


@dataclass(frozen=True)
class Served:
    """Requests that were served, the tiers that served them, and their measured results."""

    requests: tuple[Request, ...]
    tiers: Tiers
    restored: tuple[int, ...]
    ttft: tuple[float, ...]
    name: str = "demo"
    page_size: int = PAGE_SIZE
    concurrency: int = 1

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class Observed(QueuedRun):
    """A run that keeps the restored tokens and the time of each request."""

    def __init__(self, source: Served, speeds: WorkerSpeeds) -> None:
        setup = Setup("hvd", speeds.profile, source.tiers, machine=speeds.machine)
        super().__init__(source, measure(source), setup, Queueing())
        self.restored: list[int] = []
        self.ttft: list[float] = []

    def computed(self, job: Job) -> None:
        self.restored.append(self.running[-1].admission.depth)
        self.ttft.append(job.ttft)
        super().computed(job)


def serve(directory: Path, warm: bool = True) -> Served:
    """Serve the demo's conversations, with room for about one on the device and two on the host."""
    model = build_small_hybrid()
    talk = Conversations(lambda text: list(text.encode()), CONVERSATIONS)
    requests: list[Request] = []
    found: list[Generation] = []
    page, state, pages = 64 * 3072, 663_552, 30
    device, host = pages * page + 10 * state, 2 * (pages * page + 4 * state)
    with Worker(
        model, device_bytes=2 * max(pages * page, 10 * state), host_bytes=host, page_size=PAGE_SIZE,
        storage={"type": "file", "path": str(directory.absolute()), "capacity": DISK},
        options=ControllerOptions(restore_deadline=30.0, load_or_recompute=False),
    ) as worker:  # fmt: skip
        for number, (conversation, _) in enumerate(zigzag(CONVERSATIONS, TURNS)):
            prompt = talk.ask(conversation)
            if warm:  # the first pass of each length allocates memory
                worker.runner.prefill(worker.runner.new_cache(), prompt)
            found.append(worker.serve(prompt, ANSWER_TOKENS))
            worker.synchronize()
            worker.controller.flush()
            answer = found[-1].answer.astype(np.uint64)
            talk.add_answer(conversation, answer.tolist())
            requests.append(Request(prompt, answer, APART * number, number))
        tensors = worker.tensors
        slots = {PoolName.KV: tensors.page_slots, PoolName.MAMBA: tensors.state_slots}
        sizes = {name: geometry.nbytes for name, geometry in worker.geometries.items()}
    device = sum(slots[name] * sizes[name] for name in slots)
    tiers = Tiers(host, device, (StorageTier("disk", DISK),), slots[PoolName.MAMBA])
    return Served(
        tuple(requests), tiers, tuple(one.restored for one in found), tuple(one.ttft_seconds for one in found)
    )


def middle(found: Sequence[WorkerSpeeds]) -> WorkerSpeeds:
    """Return the medians of several measurements."""
    machines = [one.machine for one in found]
    curve = tuple(
        (points[0][0], statistics.median(seconds for _, seconds in points))
        for points in zip(*(machine.curve for machine in machines), strict=True)
    )
    names = [one.name for one in fields(ReplayMachine) if isinstance(getattr(machines[0], one.name), float)]
    medians = {name: statistics.median(getattr(one, name) for one in machines) for name in names}
    return replace(found[0], machine=replace(machines[0], curve=curve, **medians))  # type: ignore[arg-type]


def compare(rounds: int, repeats: int, context: int = 2048) -> tuple[Served, Observed, list[float]]:
    """Measure and serve in turn, and replay; return also the median measured times."""
    torch.set_num_threads(1)
    speeds, served = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ttft-") as directory:
            root = Path(directory)
            model = build_small_hybrid()
            speeds.append(measure_worker(model, root / "measured", context=context, repeats=repeats))
            served.append(serve(root / "served", warm=repeats > 1))
    assert len({one.restored for one in served}) == 1, "every round restores the same"
    run = Observed(served[0], middle(speeds))
    run.go()
    measured = [statistics.median(times) for times in zip(*(one.ttft for one in served), strict=True)]
    return served[0], run, measured


def main(rounds: int = 3) -> None:
    served, run, measured = compare(rounds, 3)
    for number, restored in enumerate(served.restored):
        line = {
            "request": number, "prompt": len(served.requests[number].prompt), "restored": restored,
            "restored_predicted": run.restored[number], "ttft_ms": round(measured[number] * 1e3, 1),
            "predicted_ms": round(run.ttft[number] * 1e3, 1),
        }  # fmt: skip
        print(json.dumps(line))
    summary: dict[str, float] = {"restored": sum(served.restored), "restored_predicted": sum(run.restored)}
    for name, part in (("p50", 50), ("p95", 95)):
        real, model = np.percentile(measured, part), np.percentile(run.ttft, part)
        summary |= {f"{name}_ms": round(real * 1e3, 1), f"{name}_predicted_ms": round(model * 1e3, 1)}
        summary[f"{name}_ratio"] = round(float(model / real), 3)
    print(json.dumps(summary))
    assert list(served.restored) == run.restored


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
