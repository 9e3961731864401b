"""The reference worker: a Hugging Face model behind a `HybridCacheController`.

The worker shows what an engine has to do, and in which order:

1. Restore the part of the prompt that is cached.
2. Cut the prefill at the checkpoints; at each checkpoint commit the pages and the state.
3. While decoding, take a snapshot of the state at every page boundary.
4. At the end, commit the remaining pages and the newest snapshot.

The worker also shows which stream waits for which work on a device that works asynchronously.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from transformers import PreTrainedModel

from tiercache.controller import ControllerOptions, EngineFactory, HybridCacheController
from tiercache.controller.lookup import Preview
from tiercache.controller.prefetch import PrefetchTicket
from tiercache.core import PoolName, TokenArray
from tiercache.errors import InputError, TokenError
from tiercache.integrations.transformers import arguments
from tiercache.integrations.transformers.arguments import count_of, extra_of, require, size_of
from tiercache.integrations.transformers.probe import load
from tiercache.integrations.transformers.requests.request import (
    GREEDY,
    Checked,
    Generation,
    Request,
    Sampling,
)
from tiercache.integrations.transformers.requests.scheduler import Parts, Scheduler, Turns
from tiercache.integrations.transformers.stream import TorchStream, stream_of
from tiercache.integrations.transformers.watch import Watch, identity_of
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import Spec, open_backend
from tiercache.transfer import TransferEngine, engine_for

_log = logging.getLogger(__name__)


class Worker:
    """Server of one causal language model.

    The layers of the model may be attention, recurrent or mixed layers. `model` may be a directory that
    `save_pretrained` made, with weights as safetensors. `device_bytes` and `host_bytes` bound the pools in
    the device and the host tier, in bytes or as "4GiB"; with "auto" the host size depends on the machine's
    memory. `storage` is an open store, the URL of a store, a mapping with its settings, or a list of URLs and
    mappings for a chain of tiers; closing the worker also closes the store. `engine` makes the transfer
    engine that copies between device and host (default: the one for the model's device). `stream` is the
    stream in which torch queues its work (default: the current stream of that device). `chunk_limit` is the
    maximum number of tokens of one forward pass of a prefill, a multiple of the page size (default: no
    limit).

    The default identity is a digest of everything that the model computes with (see `Watch`), so that two
    different models never share a cached byte. If hashing large weights takes too long, pass an identity
    whose revision stands for the weights. The worker still binds such an identity to everything else, for
    example to active adapters.

    Raises UnsupportedModelError for a model that the probe refuses, GeometryError for a model that is spread
    over several devices, and ConfigError for a device that is not served or has no room.

    A small model with random weights:

        >>> from transformers import AutoModelForCausalLM, Qwen3NextConfig
        >>> config = Qwen3NextConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...     num_key_value_heads=2, head_dim=16, intermediate_size=128, moe_intermediate_size=32,
        ...     shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        ...     linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        ...     linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
        ... )
        >>> model = AutoModelForCausalLM.from_config(config).eval()
        >>> with Worker(model, device_bytes="8MiB", host_bytes="8MiB", storage="memory://") as worker:
        ...     [worker.serve(range(200), 4).restored for _ in range(2)]
        [0, 192]
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        device_bytes: int | str,
        host_bytes: int | str = "auto",
        storage: StorageBackend | Spec | None = None,
        page_size: int = 64,
        identity: Identity | None = None,
        options: ControllerOptions | None = None,
        engine: EngineFactory = engine_for,
        stream: TorchStream | None = None,
        chunk_limit: int | None = None,
    ) -> None:
        device_size = size_of("device_bytes", device_bytes)
        host_size: int | Literal["auto"] = (
            "auto" if host_bytes == "auto" else size_of("host_bytes", host_bytes)
        )
        require(
            "storage",
            storage,
            StorageBackend | str | Mapping | list | tuple,
            "a store, its URL such as file:///var/lib/tiercache, its section, or a list of URLs for a chain",
        )
        require("identity", identity, Identity, "an Identity of tiercache.keys")
        require("stream", stream, TorchStream, "a TorchStream")
        if not callable(engine):
            raise InputError(
                f"engine is of type {type(engine).__name__}; give a function that makes a transfer engine"
            )
        page_size = count_of("page_size", page_size)
        most_tokens = arguments.chunk_of(chunk_limit, page_size)
        require("options", options, ControllerOptions, "ControllerOptions of tiercache.controller")
        model = arguments.model_of(model)
        self.watch = Watch(model, contents=identity is None)
        """Record of the model to which the cache is bound.

        Before every request and every commit, the model is compared with this record.
        """
        self.runner, self.probe = load(model, page_size)
        self.watch.settle()
        self.limit = self.probe.limit
        """Tokens of the longest sequence that is restored and kept; None for no limit.

        Longer sequences are computed without the cache.
        """
        page_slots, state_slots = arguments.split_device_bytes(device_size, self.runner.layout)
        self.tensors = self.runner.allocate_pools(page_slots, state_slots)
        self.device = next(self.runner.layout.tensors()).device
        self.stream = stream or stream_of(self.device)
        # The first load into the pools runs in another stream. Without this wait, the zeros of the allocation
        # could overwrite what that load has copied.
        self.stream.synchronize()
        pools = {
            name: DevicePool.from_tensors(geometry, self.tensors.of(name))
            for name, geometry in self.runner.layout.geometries.items()
        }
        # A block has a page; where there are no pages, it has a state of the smallest pool.
        paged = [self.runner.layout.kv_geometry] if self.runner.layout.has_pages else []
        block = min(g.padded_nbytes for g in paged or self.runner.layout.state_geometries.values())
        arena = HostArena(host_size, block)
        total = sum(pool.capacity * pool.geometry.nbytes for pool in pools.values())
        self.sizes = f"device: {page_slots} pages and {state_slots} states, {total >> 10} KiB; {arena.report}"
        """Sizes of the device pools and of the host arena, and the reason for the arena's size, as text."""
        _log.info("%s", self.sizes)
        self.engine_report = ""
        """Report of the transfer engine about its start; empty if it has none."""

        def reporting(
            devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool]
        ) -> TransferEngine:
            made = engine(devices, hosts)
            self.engine_report = getattr(made, "report", "")
            return made

        bound = self.watch.bound(identity) if identity else None
        bound = bound or identity_of(model, self.runner, page_size, self.watch)
        self._has_storage = storage is not None
        opened = storage if storage is None or isinstance(storage, StorageBackend) else open_backend(storage)
        profile = arguments.known_profile(model)
        try:
            self.controller = HybridCacheController(
                bound, pools, arena, opened, options=options, profile=profile, engine=reporting
            )
        except BaseException:
            if opened is not None and opened is not storage:
                opened.close()
            raise
        self._parts = Parts(
            self.controller, self.runner, self.tensors, self.stream, self.watch, self.limit, most_tokens
        )
        self.scheduler = Scheduler(self._parts)
        """Admission of requests, and their turns."""

    def serve(
        self,
        tokens: Any,
        new_tokens: int,
        *,
        stop: int | Iterable[int] = (),
        extra: bytes = b"",
        audit: bool = False,
        sampling: Sampling = GREEDY,
    ) -> Generation:
        """Answer a prompt with up to `new_tokens` tokens; end early after a token of `stop`.

        The tokens are chosen by `sampling`. With `audit`, the generation keeps a copy of the restored state,
        and the measured times leave out that copy. The request is computed without the cache if the device
        pools are too small (the reason is `busy`), or if the prompt is longer than `limit` (the reason is
        `disabled`).

        Raises TokenError for an empty prompt, for ids outside the vocabulary and for more tokens than the
        model has positions; InputError for `new_tokens` below 1; ConfigError if the model or torch's numeric
        settings have changed since the worker was made.
        """
        request = self._checked(Request(tokens, new_tokens, stop, extra, sampling))
        task = self.scheduler.begin(request, audit=audit, started=time.perf_counter())
        try:
            return task.run()
        finally:
            task.close()

    def serve_all(
        self, requests: Iterable[Request], *, in_flight: int = 8, audit: bool = False, below: bool = False
    ) -> list[Generation | Exception]:
        """Answer several requests in turns of one forward pass each, at most `in_flight` at a time.

        The result has, in the order of the requests, each one's generation, or the exception that ended it; a
        request that fails does not disturb the others. Each answer is the one that `serve` computes with the
        same cuts. Times count from the call, so they include the turns of other requests. Without
        `audit`, the caches of the generations are empty.

        A request for which the device pools have no room waits until others have ended. If an answer needs
        another page and there is none, the youngest request is parked, on the host or with `below` in
        storage, and goes on later, bit for bit. A request that the pools could not hold alone is computed
        without the cache, as `serve` does.

        Raises what `serve` raises for a request that is not possible, before any begins; and ClosedError for
        a closed worker.
        """
        if below and not self._has_storage:
            raise InputError("there is no storage to park requests in; leave out below=True")
        checked = []
        for number, request in enumerate(requests):
            try:
                checked.append(self._checked(request))
            except (InputError, TokenError) as error:
                raise type(error)(f"request {number} (the first is 0): {error}") from error
        most = count_of("in_flight", in_flight)
        return Turns(self.scheduler, checked, most, audit=audit, below=below).run()

    def _checked(self, request: Request) -> Checked:
        """Return a request in the worker's form. Raises InputError and TokenError as `serve` does."""
        require("a request", request, Request, "a Request of tiercache.integrations.transformers")
        require("sampling", request.sampling, Sampling, "a Sampling of tiercache.integrations.transformers")
        count = count_of("new_tokens", request.new_tokens)
        stops, extra = arguments.stops_of(request.stop), extra_of(request.extra)
        return Checked(self._prompt(request.tokens, count), count, stops, extra, request.sampling)

    def preview(self, tokens: Any, *, extra: bytes = b"") -> Preview:
        """Return what the index knows of a prompt; storage is not asked, and nothing is reserved or counted.

        Raises TokenError as `prefetch` does.
        """
        return self.controller.preview(self._prefix(tokens), extra_of(extra))

    def _prompt(self, tokens: Any, new_tokens: int) -> TokenArray:
        """Return checked tokens.

        Raises TokenError if there are none, or if the model lacks positions for them and the new ones.
        """
        prompt = self.runner.checked(tokens)
        if not len(prompt):
            raise TokenError("the prompt is empty; pass at least one token")
        # The last new token is never fed to the model, so it needs no position.
        fed, positions = len(prompt) + new_tokens - 1, self.runner.positions
        if positions is not None and fed > positions:
            raise TokenError(
                f"a prompt of {len(prompt)} tokens and {new_tokens} new ones need {fed} positions, and the"
                f" model has {positions}; shorten the prompt, or ask for fewer"
            )
        return prompt

    def prefetch(self, tokens: Any, *, extra: bytes = b"") -> PrefetchTicket:
        """Begin to bring what storage has of `tokens` to the host (see `HybridCacheController.prefetch`).

        The ticket goes on whenever the worker serves or synchronizes. Raises TokenError for no tokens and for
        ids outside the vocabulary.
        """
        return self.controller.prefetch(self._prefix(tokens), extra_of(extra))

    def pin(self, tokens: Any, ttl: float, *, extra: bytes = b"") -> int:
        """Keep the whole pages of `tokens` on the host for `ttl` seconds (see `HybridCacheController.pin`).

        Returns the number of tokens of these pages. Raises also TokenError as `prefetch` does.
        """
        return self.controller.pin(self._prefix(tokens), ttl, extra_of(extra))

    def unpin(self, tokens: Any, *, extra: bytes = b"") -> bool:
        """End the pin of `tokens`; return whether there was one. Raises TokenError as `prefetch` does."""
        return self.controller.unpin(self._prefix(tokens), extra_of(extra))

    def hint(self, tokens: Any, expected_in: float, *, extra: bytes = b"") -> int:
        """Expect a continuation of `tokens` in `expected_in` seconds (see `HybridCacheController.hint`).

        Returns the number of tokens whose restore the hint protects. Raises also TokenError as `prefetch`
        does.
        """
        return self.controller.hint(self._prefix(tokens), expected_in, extra_of(extra))

    def _prefix(self, tokens: Any) -> TokenArray:
        """Return the part of checked tokens that the cache may hold (see `limit`)."""
        return self.runner.checked(tokens)[: self.limit]

    def synchronize(self) -> None:
        """Wait until the device has finished the last request.

        After that, the slots of the request are free, and the pages and states that it committed can be
        evicted.
        """
        self.scheduler.synchronize()

    def close(self) -> bool:
        """Drain and close the controller; return whether all its operations ended and no thread hangs."""
        return self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
