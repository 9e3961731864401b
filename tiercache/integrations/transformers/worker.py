"""The reference worker: a Hugging Face model behind a `HybridCacheController`, one request at a time.

It shows what an engine has to do and in which order: restore, cut the prefill at the checkpoints, hand pages and states over at each, take
snapshots at page boundaries while decoding, commit the newest at the end; and, on a device that works behind the thread's back, which
stream waits for what.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Self

import torch
from blake3 import blake3
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tiercache.controller import Admission, ControllerOptions, EngineFactory, HybridCacheController, Lookup, Sources
from tiercache.controller.state import Fence
from tiercache.core import PoolName, Reason, Tier, TokenArray, as_tokens
from tiercache.errors import ConfigError, InputError, PoolFullError, TransferError
from tiercache.geometry import Geometry
from tiercache.integrations.transformers.probe import ProbeReport, load
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.stream import TorchStream, stream_of
from tiercache.keys import Identity
from tiercache.policy import ModelProfile, profile_of
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.storage.base import StorageBackend
from tiercache.transfer import TransferEngine, engine_for

_log = logging.getLogger(__name__)

_DECODE_SNAPSHOTS = 2
"""State slots that decoding alternates between, so that the newest complete snapshot survives while the next is taken."""
_COPY_SECONDS = 1.0
"""How long a request waits at most for slots that the previous one's copies to the host still hold."""
_CHECKPOINTS = 3
"""State slots for one prefill: branch point, prompt end, and a prompt that ends with its page. More are taken where rules ask for more."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of one request.

    `tokens`: prompt and answer; `bounds`: the depth after every forward pass; `states`: depths at which states were committed. `restored`
    is in tokens, times in seconds: `restore_seconds` until the cache was filled, `ttft_seconds` until the first logits `[vocab]` were there
    (on a device: by its own clock, and after waiting for it).
    """

    prompt_tokens: int
    tokens: TokenArray
    first_logits: torch.Tensor
    restored: int
    sources: Sources
    reason: Reason
    bounds: tuple[int, ...]
    states: tuple[int, ...]
    restore_seconds: float
    ttft_seconds: float
    cache: DynamicCache = field(repr=False)
    restored_state: Mapping[tuple[int, str], torch.Tensor] = field(repr=False, default_factory=dict)

    @property
    def answer(self) -> TokenArray:
        """The tokens that were generated."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None


class Worker:
    """Serves a causal language model with attention, recurrent or mixed layers; greedy decoding.

    `device_bytes` and `host_bytes` bound the pools ("auto" asks the machine for host memory). `storage` is closed with the worker. The
    identity defaults to the digest of the configuration and every weight, so that no two models ever share a byte; pass one where hashing
    takes too long. `engine` makes what copies between device and host (default: the one for the model's device); `stream` is where torch's
    work is queued (default: the current stream of that device).

    Raises UnsupportedModelError for a model that the probe refuses, GeometryError for one that is spread over several devices, ConfigError
    for a device that is not served or has no room. Thread rule: one owner thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device_bytes: int,
        host_bytes: int | Literal["auto"] = "auto",
        storage: StorageBackend | None = None,
        page_size: int = 64,
        identity: Identity | None = None,
        options: ControllerOptions | None = None,
        engine: EngineFactory = engine_for,
        stream: TorchStream | None = None,
    ) -> None:
        self.runner, self.report = load(model, page_size)
        geometries = self.runner.layout.geometries
        page_slots, state_slots = split_device_bytes(device_bytes, geometries)
        self.tensors = self.runner.allocate_pools(page_slots, state_slots)
        self.device = next(self.runner.layout.kv_tensors()).device
        self.stream = stream or stream_of(self.device)
        self.stream.synchronize()  # the first load comes in another stream, and the zeros must not land on top of it
        self._released: Fence | None = None
        pools = {
            name: DevicePool.from_tensors(g, self.tensors.states if name is PoolName.MAMBA else self.tensors.kv)
            for name, g in geometries.items()
        }
        block = geometries[PoolName.KV].padded_nbytes
        arena = HostArena(host_bytes, block)
        self.sizes = (
            f"device: {page_slots} pages and {state_slots} states, {sum(map(pool_bytes, pools.values())) >> 10} KiB; {arena.report}"
        )
        """How large the pools are and, for the host arena, why."""
        _log.info("%s", self.sizes)
        self.engine_report = ""
        """What the transfer engine has to say about its start; empty for one that has nothing."""

        def reporting(devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool]) -> TransferEngine:
            made = engine(devices, hosts)
            self.engine_report = getattr(made, "report", "")
            return made

        self.controller = HybridCacheController(
            identity or identity_of(model, self.runner, page_size),
            pools,
            arena,
            storage,
            options=options,
            profile=_profile_of(model),
            engine=reporting,
        )

    @property
    def probe(self) -> ProbeReport:
        """What the checks at load found."""
        return self.report

    def serve(self, tokens: Any, new_tokens: int, *, stop: Iterable[int] = (), extra: bytes = b"", audit: bool = False) -> Generation:
        """Answer a prompt with up to `new_tokens` greedy tokens; ends early behind a token of `stop`.

        With `audit`, the generation keeps a copy of the restored state, for `Audit`, in time that is not counted. Where the device pools
        are too small for the request, it is computed without the cache, for reason `busy`.

        Raises TokenError for an empty prompt and for ids outside the vocabulary, InputError for `new_tokens` below 1.
        """
        prompt = self.runner.checked(tokens)
        if new_tokens < 1:
            raise InputError(f"{new_tokens} new tokens cannot be generated; ask for at least one")
        started = time.perf_counter()
        lookup = self.controller.lookup(prompt, extra)
        states = _CHECKPOINTS + _DECODE_SNAPSHOTS if self.runner.layout.state_geometry else 0
        admission = self._admit(lookup, len(prompt) + new_tokens, states)
        try:
            return _Request(self, admission, prompt, audit, started).run(new_tokens, frozenset(stop))
        finally:
            if admission is not None:
                self._released = self.stream.fence()
                self.controller.release(admission, fence=self._released)

    def synchronize(self) -> None:
        """Return once the device is through with the last request, whose slots are free then, and its pages and states evictable."""
        if self._released is not None:
            self._released.synchronize()
            self._released = None
        self.controller.tick()

    def _admit(self, lookup: Lookup, tokens: int, states: int) -> Admission | None:
        """An admission; None if the device pools have no room for it. Copies of the last request still hold slots, for milliseconds."""
        deadline = time.monotonic() + _COPY_SECONDS
        while True:
            try:
                return self.controller.admit(lookup, tokens=tokens, states=states)
            except PoolFullError as error:
                if self._released is not None:
                    self.synchronize()  # before that, copies of its pages have not even begun
                    deadline = time.monotonic() + _COPY_SECONDS
                    continue
                possible = -(-tokens // self.controller.page_size) <= self.tensors.page_slots
                if not possible or time.monotonic() > deadline or not self.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", tokens, error)
                    return None

    def close(self) -> bool:
        """Drain and close the controller; see there."""
        return self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Request:
    """One `serve`: the live cache and what is committed of it. Without an admission nothing is restored or committed."""

    def __init__(self, worker: Worker, admission: Admission | None, prompt: TokenArray, audit: bool, started: float) -> None:
        self._worker = worker
        self._runner = worker.runner
        self._admission = admission
        self._audit = audit
        self._started = started
        self._tokens: list[int] = prompt.tolist()
        self._prompt = prompt
        self._restored_state: dict[tuple[int, str], torch.Tensor] = {}
        self._bounds: list[int] = []
        self._states: list[int] = []
        self._cache, self._exported = self._restore()
        self._restored = self._exported
        self._filled = worker.stream.mark()

    def run(self, new_tokens: int, stop: frozenset[int]) -> Generation:
        cuts = self._cuts()
        logits = first = self._runner.prefill(self._cache, self._prompt, self._restored, cuts, self._hand_over)
        self._bounds += [*(c for c in cuts if c < len(self._prompt)), len(self._prompt)]
        computed = self._worker.stream.mark()
        self._worker.stream.synchronize()  # or the time would be that of queueing the work
        ttft = time.perf_counter() - self._started
        self._decode(logits, new_tokens, stop)
        return Generation(
            prompt_tokens=len(self._prompt),
            tokens=as_tokens(self._tokens),
            first_logits=first,
            restored=self._restored,
            sources=self._admission.sources if self._admission else Sources(),
            reason=self._admission.reason if self._admission else Reason.BUSY,
            bounds=tuple(self._bounds),
            states=tuple(self._states),
            restore_seconds=max(0.0, ttft - self._worker.stream.seconds(self._filled, computed)),
            ttft_seconds=ttft,
            cache=self._cache,
            restored_state=self._restored_state,
        )

    def _cuts(self) -> tuple[int, ...]:
        """Where to cut the prefill; where rules ask for more states than there are slots for, the deepest."""
        if self._admission is None:
            return ()
        cuts = self._admission.checkpoints
        more = len(cuts) - _CHECKPOINTS
        if more > 0:
            try:
                self._admission.extend(len(self._prompt), more)
            except PoolFullError:
                return cuts[more:]
        return cuts

    def _restore(self) -> tuple[DynamicCache, int]:
        """The cache to continue from, and how many tokens it holds."""
        while self._admission is not None and (depth := self._settled_depth()):
            pages = self._admission.pages[PoolName.KV][: depth // self._runner.page_size]
            state = self._admission.restored_states.get(PoolName.MAMBA)
            try:
                wait_layer = partial(self._admission.wait_layer, stream=self._worker.stream.handle)
                cache = self._runner.restore(self._worker.tensors, pages, state, wait_layer=wait_layer)
            except TransferError as error:
                _log.warning("a layer could not be loaded: %s", error)
                self._worker.controller.tick(wait=0.01)  # once the load has landed, the next poll names what is still restorable
                continue
            if self._audit:
                self._keep_state(cache)
            return cache, depth
        return self._runner.new_cache(), 0

    def _settled_depth(self) -> int:
        """The depth to restore. After a load that failed there may be too few slots to compute in: without the cache then."""
        assert self._admission is not None
        deadline = time.monotonic() + _COPY_SECONDS
        while True:
            try:
                return self._admission.wait().depth
            except PoolFullError as error:
                if time.monotonic() > deadline or not self._worker.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", len(self._prompt), error)
                    self._admission = None
                    return 0

    def _keep_state(self, cache: DynamicCache) -> None:
        """Copy the restored state for the audit, out of what the forward will read, and before it writes there; off the clock."""
        self._worker.stream.synchronize()
        began = time.perf_counter()
        layout = self._runner.layout
        self._restored_state = {(t.layer, t.name): layout.tensor_of(cache, t.layer, t.name)[0].clone() for t in layout.state_tensors()}
        self._worker.stream.synchronize()
        self._started += time.perf_counter() - began

    def _hand_over(self, depth: int) -> None:
        """The prefill stands at a checkpoint: commit its pages and its state."""
        if self._admission is not None and depth % self._runner.page_size == 0:
            self._commit(depth, self._snapshot())

    def _decode(self, logits: torch.Tensor, new_tokens: int, stop: frozenset[int]) -> None:
        """Greedy decoding. The state at each page boundary goes to one of two slots in turn; the newest is committed at the end."""
        page_size = self._runner.page_size
        slots = [self._take() for _ in range(_DECODE_SNAPSHOTS)]
        newest: tuple[int, Mapping[PoolName, int]] | None = None
        for count in range(new_tokens):
            token = int(logits.argmax())
            self._tokens.append(token)
            if token in stop or count + 1 == new_tokens:
                break
            logits = self._runner.forward(self._cache, [token], len(self._tokens) - 1)
            self._bounds.append(len(self._tokens))
            if len(self._tokens) % page_size == 0:
                newest = (len(self._tokens), slots[0])
                self._export_state(slots[0])
                slots.reverse()
        if self._admission is not None:
            # The last token was never fed, so the cache holds one token less than the sequence.
            held = self._runner.layout.length(self._cache)
            if not self._admission.keeps_end:
                newest = None
            self._commit(held, newest[1] if newest else {}, at=newest[0] if newest else 0)

    def _snapshot(self) -> Mapping[PoolName, int]:
        slots = self._take()
        self._export_state(slots)
        return slots

    def _take(self) -> Mapping[PoolName, int]:
        return self._admission.take_states() if self._admission is not None else {}

    def _export_state(self, slots: Mapping[PoolName, int]) -> None:
        for slot in slots.values():
            self._runner.export_state(self._cache, self._worker.tensors, slot)

    def _commit(self, depth: int, slots: Mapping[PoolName, int], at: int | None = None) -> None:
        """Commit the first `depth` tokens, with a state at `at` (default: at `depth`) where there is one."""
        assert self._admission is not None
        page_size = self._runner.page_size
        first, last = self._exported // page_size, depth // page_size
        if last > first:
            self._runner.export_pages(self._cache, self._worker.tensors, first, self._admission.pages[PoolName.KV][first:last])
            self._exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # Everything that writes these slots is queued by now; copies to the host begin behind it.
        self._worker.controller.commit(self._admission, as_tokens(self._tokens[:depth]), states, fence=self._worker.stream.fence())
        self._states += states


def pool_bytes(pool: DevicePool) -> int:
    """Payload bytes of all slots."""
    return pool.capacity * pool.geometry.nbytes


def _profile_of(model: PreTrainedModel) -> ModelProfile | None:
    """The profile that the eviction policy weighs by; None, and the default's, for an architecture that is not known."""
    try:
        return profile_of(model.config.to_dict())
    except ConfigError as error:
        _log.info("weighing by the default model profile: %s", error)
        return None


def split_device_bytes(device_bytes: int, geometries: Mapping[PoolName, Geometry]) -> tuple[int, int]:
    """How many page slots and state slots `device_bytes` give: half for states, because without a state no page is restorable.

    ConfigError if that is too little to hold a single request.
    """
    page = geometries[PoolName.KV].nbytes
    state = geometries[PoolName.MAMBA].nbytes if PoolName.MAMBA in geometries else 0
    # Besides those that a request fills: the one it restores, and the one that its admission reserves to bring that up from below.
    least = _CHECKPOINTS + _DECODE_SNAPSHOTS + 2 if state else 0
    states = max(least, min(device_bytes // 2 // state, 1 << 16)) if state else 0
    pages = (device_bytes - states * state) // page
    if pages < 2:
        raise ConfigError(
            f"{device_bytes} device bytes are too few; {least} states and 2 pages of this model take {least * state + 2 * page}"
        )
    return pages, states


_NOT_COMPUTED: Final = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype"})
"""Configuration entries that saving and loading sets; the weights' own dtypes are in the digest."""


def identity_of(model: PreTrainedModel, runner: ModelRunner, page_size: int) -> Identity:
    """An identity whose revision is the digest of class, configuration and every weight: equal only for models that compute the same.

    A model that was saved and loaded again, from whatever directory, keeps its identity; another version of transformers, which writes
    its number into every configuration, does not.
    """
    config = model.config.to_dict()
    digest = blake3(max_threads=blake3.AUTO)
    digest.update(json.dumps([type(model).__name__, _computed(config)], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    dtypes = {name: "+".join(sorted({s.dtype for s in g.segments})) for name, g in runner.layout.geometries.items()}
    return Identity(
        model=type(model).__name__,
        revision=digest.hexdigest(),
        weights_dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=dtypes[PoolName.KV],
        state_dtype=dtypes.get(PoolName.MAMBA, ""),
        page_size=page_size,
        quantization=str(config.get("quantization_config") or ""),
    )


def _computed(config: Any) -> Any:
    """A configuration, nested ones too, without what does not enter the computation."""
    if isinstance(config, Mapping):
        return {str(key): _computed(value) for key, value in config.items() if key not in _NOT_COMPUTED}
    return [_computed(value) for value in config] if isinstance(config, list | tuple) else config
