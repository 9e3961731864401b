"""The reference worker: a Hugging Face model behind a `HybridCacheController`, one request at a time.

It shows what an engine has to do and in which order: restore, cut the prefill at the checkpoints, hand pages and states over at each, take
snapshots at page boundaries while decoding, commit the newest at the end; and, on a device that works asynchronously, which stream waits
for what.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from transformers import PreTrainedModel

from tiercache.controller import Admission, ControllerOptions, EngineFactory, HybridCacheController, Lookup
from tiercache.controller.state import Fence
from tiercache.core import PoolName, Reason
from tiercache.errors import ConfigError, InputError, PoolFullError, TokenError
from tiercache.geometry import Geometry
from tiercache.integrations.transformers.arguments import count_of, extra_of, model_of, require, size_of, stops_of
from tiercache.integrations.transformers.identity import identity_of
from tiercache.integrations.transformers.probe import ProbeReport, load
from tiercache.integrations.transformers.request import CHECKPOINTS, COPY_SECONDS, DECODE_SNAPSHOTS, Generation, Request
from tiercache.integrations.transformers.stream import TorchStream, stream_of
from tiercache.integrations.transformers.watch import Watch
from tiercache.keys import Identity
from tiercache.policy import ModelProfile, profile_of
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.transfer import TransferEngine, engine_for

_log = logging.getLogger(__name__)


class Worker:
    """Serves a causal language model with attention, recurrent or mixed layers; greedy decoding.

    `model` may be a directory that `save_pretrained` made, with weights as safetensors. `device_bytes` and `host_bytes` bound the pools,
    in bytes or as "4GiB" ("auto" chooses the host size by the machine's memory). `storage` is an open store, or the URL or section of
    one; it is closed with the worker. The identity defaults to a digest of everything that the model computes with (see `Watch`), so that
    no two models ever share a byte. Where hashing large weights takes too long, pass an identity whose revision stands for the weights;
    everything else, such as active adapters, is bound to it here.

    Raises UnsupportedModelError for a model that the probe refuses, GeometryError for one that is spread over several devices, ConfigError
    for a device that is not served or has no room. `engine` makes the transfer engine that copies between device and host (default: the
    one for the model's device); `stream` is the stream in which torch's work is queued (default: the current stream of that device).

    Thread safety: one owner thread.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        device_bytes: int | str,
        host_bytes: int | str = "auto",
        storage: StorageBackend | str | Mapping[str, Any] | None = None,
        page_size: int = 64,
        identity: Identity | None = None,
        options: ControllerOptions | None = None,
        engine: EngineFactory = engine_for,
        stream: TorchStream | None = None,
    ) -> None:
        device_size = size_of("device_bytes", device_bytes)
        host_size: int | Literal["auto"] = "auto" if host_bytes == "auto" else size_of("host_bytes", host_bytes)
        require("storage", storage, StorageBackend | str | Mapping, "a store, its URL such as file:///var/lib/tiercache, or its section")
        require("identity", identity, Identity, "an Identity of tiercache.keys")
        require("stream", stream, TorchStream, "a TorchStream")
        if not callable(engine):
            raise InputError(f"engine is of type {type(engine).__name__}; give a function that makes a transfer engine")
        page_size = count_of("page_size", page_size)
        require("options", options, ControllerOptions, "ControllerOptions of tiercache.controller")
        model = model_of(model)
        self.watch = Watch(model, contents=identity is None)
        """The check whether the model is still the one that the cache is bound to; made before every request and every commit."""
        self.runner, self.report = load(model, page_size)
        self.watch.settle()
        self.limit = self.report.reach.limit
        """Tokens of the longest sequence that is restored and kept; None for no limit. Longer ones are computed without the cache."""
        geometries = self.runner.layout.geometries
        page_slots, state_slots = split_device_bytes(device_size, geometries)
        self.tensors = self.runner.allocate_pools(page_slots, state_slots)
        self.device = next(self.runner.layout.kv_tensors()).device
        self.stream = stream or stream_of(self.device)
        self.stream.synchronize()  # the first load runs in another stream; the pools' zeros must not overwrite it
        self._released: Fence | None = None
        pools = {
            name: DevicePool.from_tensors(g, self.tensors.states if name is PoolName.MAMBA else self.tensors.kv)
            for name, g in geometries.items()
        }
        block = geometries[PoolName.KV].padded_nbytes
        arena = HostArena(host_size, block)
        self.sizes = (
            f"device: {page_slots} pages and {state_slots} states, {sum(map(pool_bytes, pools.values())) >> 10} KiB; {arena.report}"
        )
        """A line for people: the sizes of the pools and, for the host arena, the reason for its size."""
        _log.info("%s", self.sizes)
        self.engine_report = ""
        """The report of the transfer engine about its start; empty if it makes none."""

        def reporting(devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool]) -> TransferEngine:
            made = engine(devices, hosts)
            self.engine_report = getattr(made, "report", "")
            return made

        bound = self.watch.bound(identity) if identity else identity_of(model, self.runner, page_size, self.watch)
        opened = open_backend(storage) if isinstance(storage, str | Mapping) else storage
        try:
            self.controller = HybridCacheController(
                bound, pools, arena, opened, options=options, profile=_profile_of(model), engine=reporting
            )
        except BaseException:
            if opened is not None and opened is not storage:
                opened.close()
            raise

    @property
    def probe(self) -> ProbeReport:
        """The report of the checks at load."""
        return self.report

    def serve(self, tokens: Any, new_tokens: int, *, stop: int | Iterable[int] = (), extra: bytes = b"", audit: bool = False) -> Generation:
        """Answer a prompt with up to `new_tokens` greedy tokens; end early after a token of `stop`.

        With `audit`, the generation keeps a copy of the restored state for `Audit`; the time of that copy is not counted. Where the device
        pools are too small, the request is computed without the cache, with reason `busy`; where the prompt is longer than `limit`, with
        reason `disabled`.

        Raises TokenError for an empty prompt, for ids outside the vocabulary and for more tokens than the model has positions, InputError
        for `new_tokens` below 1, ConfigError if the model or torch's numeric settings are no longer what they were when the worker was
        made.
        """
        count, stops, context = count_of("new_tokens", new_tokens), stops_of(stop), extra_of(extra)
        prompt = self.runner.checked(tokens)
        fed, positions = len(prompt) + count - 1, self.runner.positions  # the last token is not fed
        if positions is not None and fed > positions:
            raise TokenError(
                f"a prompt of {len(prompt)} tokens and {count} new ones need {fed} positions, and the model has {positions}; "
                "shorten the prompt, or ask for fewer"
            )
        self.watch.check()
        started = time.perf_counter()
        if self.limit is not None and len(prompt) > self.limit:
            return Request(self, None, prompt, audit, started, Reason.DISABLED).run(count, stops)
        lookup = self.controller.lookup(prompt, context)
        states = CHECKPOINTS + DECODE_SNAPSHOTS if self.runner.layout.state_geometry else 0
        admission = self._admit(lookup, min(len(prompt) + count, self.limit or sys.maxsize), states)
        try:
            return Request(self, admission, prompt, audit, started).run(count, stops)
        finally:
            if admission is not None:
                self._released = self.stream.fence()
                self.controller.release(admission, fence=self._released)

    def synchronize(self) -> None:
        """Wait until the device has finished the last request; its slots are free then, and its pages and states can be evicted."""
        if self._released is not None:
            self._released.synchronize()
            self._released = None
        self.controller.tick()

    def _admit(self, lookup: Lookup, tokens: int, states: int) -> Admission | None:
        """Admit a request; return None if the device pools have no room for it.

        Copies of the last request still hold slots, for milliseconds, so a full pool is tried again for up to `COPY_SECONDS`.
        """
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            try:
                return self.controller.admit(lookup, tokens=tokens, states=states)
            except PoolFullError as error:
                if self._released is not None:
                    self.synchronize()  # copies of its pages begin only after that
                    deadline = time.monotonic() + COPY_SECONDS
                    continue
                possible = -(-tokens // self.controller.page_size) <= self.tensors.page_slots
                if not possible or time.monotonic() > deadline or not self.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", tokens, error)
                    return None

    def close(self) -> bool:
        """Drain and close the controller; return whether everything was drained and no call hangs."""
        return self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def pool_bytes(pool: DevicePool) -> int:
    """Return the payload bytes of all slots of a pool."""
    return pool.capacity * pool.geometry.nbytes


def _profile_of(model: PreTrainedModel) -> ModelProfile | None:
    """Return the model profile by which the eviction policy weighs; None, which stands for the default, if the architecture is unknown."""
    try:
        return profile_of(model.config.to_dict())
    except ConfigError as error:
        _log.info("weighing by the default model profile: %s", error)
        return None


def split_device_bytes(device_bytes: int, geometries: Mapping[PoolName, Geometry]) -> tuple[int, int]:
    """Return the numbers of page slots and state slots for `device_bytes`.

    Half of the bytes go to states, because without a state no page can be restored. Raises ConfigError if the bytes are too few to hold a
    single request.
    """
    page = geometries[PoolName.KV].nbytes
    state = geometries[PoolName.MAMBA].nbytes if PoolName.MAMBA in geometries else 0
    # Two more than a request fills: the state that it restores, and the slot that its admission reserves to bring that state up.
    least = CHECKPOINTS + DECODE_SNAPSHOTS + 2 if state else 0
    states = max(least, min(device_bytes // 2 // state, 1 << 16)) if state else 0
    pages = (device_bytes - states * state) // page
    if pages < 2:
        raise ConfigError(
            f"{device_bytes} device bytes are too few; {least} states and 2 pages of this model take {least * state + 2 * page}"
        )
    return pages, states
