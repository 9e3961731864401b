"""A worker process on a host, asked in JSON: it serves the demo's model, and audits every answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3NextForCausalLM

from tests.hosts.network import enter
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.errors import StorageError
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.registry import spec_of
from tiercache_lab.demo.audit import Audit, AuditedRun
from tiercache_lab.demo.serving import timed, uncut_prefill
from tiercache_lab.demo.small import small_hybrid_config, strengthen

AUDIT_SLOTS = (2048, 512)
"""Pages and states that an audit can hold; they take memory as they are used."""


def build_model(layers: int) -> PreTrainedModel:
    """Build the demo's model with the first of its layers only; every fourth layer has full attention."""
    config = small_hybrid_config()
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    config.mlp_only_layers = list(range(layers))
    torch.manual_seed(0)
    return strengthen(Qwen3NextForCausalLM(config).eval(), 0)


class Server:
    """One worker, and the audit of its answers."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._worker = Worker(
            build_model(plan["layers"]),
            device_bytes=plan["device_bytes"],
            host_bytes=plan["host_bytes"],
            storage=spec_of(plan["storage"]) if plan["storage"] else None,
            page_size=plan["page_size"],
            # Whether a restore is worth its time depends on the machine; these tests are about what arrives.
            options=ControllerOptions(restore_deadline=plan["deadline"], load_or_recompute=False),
        )
        self._audit = Audit(self._worker.runner, *AUDIT_SLOTS)

    def serve(self, prompt: list[int], new: int, cold: bool, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer a prompt, and say what the audit found.

        With `cold`, the worker's own tiers are emptied first. `runs` are those of other workers with the same
        beginning, which the audit must know.
        """
        for run in runs:
            self._audit.recompute(AuditedRun.from_json(run))
        if cold:
            self.empty()
        tokens = np.array(prompt, np.uint64)
        started = time.perf_counter()
        generation = self._worker.serve(tokens, new, audit=True)
        seconds = time.perf_counter() - started
        # Logits of a prefill in one pass would cost another pass; the answer is recomputed with its own cuts.
        verdict = self._audit.check(generation, uncut=generation.first_logits)
        return {
            "restored": generation.restored,
            "tier": None if generation.tier is None else str(generation.tier),
            "reason": str(generation.reason),
            "bytes": self._bytes(generation),
            "seconds": seconds,
            "right": verdict.same_text and verdict.same_bytes and verdict.max_logit_diff == 0.0,
            "run": verdict.run.to_json(),
        }

    def empty(self) -> None:
        """Evict everything from the device and the host."""
        self._worker.synchronize()
        self._worker.controller.evict(Tier.DEVICE)
        self._worker.controller.evict(Tier.HOST)

    def flush(self) -> bool:
        """Wait until everything is stored; return whether it is."""
        try:
            return self._worker.controller.flush()
        except StorageError:  # the store cannot be reached
            return False

    def time(self, prompt: list[int]) -> dict[str, Any]:
        """Restore a prompt with empty tiers of this worker, and recompute it; times until the first token."""
        tokens = np.array(prompt, np.uint64)
        self.empty()
        restore = self._worker.serve(tokens, 1)
        recompute, _ = timed([lambda: uncut_prefill(self._worker.runner, tokens)], self._worker.stream)
        return {
            "hit": restore.tier is Tier.STORAGE, "restored": restore.restored,
            "bytes": self._bytes(restore), "ttft": restore.ttft_seconds, "recompute": recompute,
        }  # fmt: skip

    def _bytes(self, generation: Generation) -> int:
        """Return the bytes that came from storage."""
        geometries = self._worker.runner.layout.geometries
        return sum(
            n * geometries[pool].nbytes
            for (tier, pool), n in generation.sources.objects.items()
            if tier is Tier.STORAGE
        )

    def close(self) -> bool:
        """Close the worker; return whether all its operations ended."""
        return self._worker.close()


def run(holder: int, channel: Connection, plan: Mapping[str, Any]) -> None:
    """Be a worker on the host of that holder, until the other end of the channel is closed."""
    enter(holder)
    torch.set_num_threads(1)
    server = Server(plan)
    channel.send_bytes(b'"serving"')
    while True:
        try:
            request = json.loads(channel.recv_bytes())
        except EOFError:
            return
        channel.send_bytes(json.dumps(getattr(server, request.pop("do"))(**request)).encode())
