"""Speeds of the reference worker with one model, measured as the machine of a replay.

The worker's parts are measured one by one: forward passes of several lengths, a pass behind a long context,
what a request and a cut cost beside their passes, a token of decoding, and loads of two sizes from the host
and from a file store.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Tier, TokenArray
from tiercache.errors import ConfigError
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.worker import Worker
from tiercache.policy import ModelProfile, profile_of
from tiercache_lab.replay.machines import ReplayMachine, machine_text

PAGE_SIZE: Final = 64
_PASSES: Final = (1, 16, 64, 128, 192, 256, 512, 1024, 2048, 4096)
"""Tokens of the forward passes that are measured, up to the context."""
_PIECE: Final = 256
"""Tokens of the pass that is measured behind the longest context."""
_ANSWER: Final = 48
"""Tokens of the answers whose decoding is measured."""
_STORE: Final = 1 << 30
"""Capacity of the file store."""
MACHINE: Final = "machine.toml"
CONFIG: Final = "config.json"
"""Names of the files that `write` makes."""


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """Measured machine and the profile of the model for which it holds."""

    machine: ReplayMachine
    profile: ModelProfile

    def write(self, directory: Path, model: PreTrainedModel, about: str) -> None:
        """Write the files for `--machine` and `--profile` of a replay of the measured model."""
        # A config need not say the dtype, and the profile would take bfloat16.
        config: dict[str, Any] = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(config, default=str, indent=1) + "\n")
        (directory / MACHINE).write_text(machine_text(self.machine, about))


def measure_worker(
    model: PreTrainedModel,
    directory: Path,
    *,
    context: int = 4096,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> WorkerSpeeds:
    """Measure a worker with this model; `directory` gets its file store, which the caller removes.

    `context` is the longest prompt in tokens. `say` is called with what is measured next. All times are
    medians of `repeats` runs. Raises ConfigError for a context below 512 tokens, and for a model whose
    architecture has no profile.
    """
    if context < 512:
        raise ConfigError(f"a context of {context} tokens is too short to measure; use 512 or more")
    return _Measurement(model, directory, context, repeats, say).speeds()


class _Measurement:
    def __init__(
        self, model: PreTrainedModel, directory: Path, context: int, repeats: int, say: Callable[[str], None]
    ) -> None:
        self._context, self._repeats, self._say = context, repeats, say
        self._profile = profile_of(model.config.to_dict(), "measured")
        self._random = np.random.default_rng(0)
        self._vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        room = 4 * (context * self._profile.kv_bytes_per_token + 16 * self._profile.state_bytes)
        self._worker = Worker(
            model, device_bytes=2 * room, host_bytes=room,
            storage={"type": "file", "path": str(directory.absolute()), "capacity": _STORE},
            page_size=PAGE_SIZE, options=ControllerOptions(restore_deadline=30.0, load_or_recompute=False),
        )  # fmt: skip

    def speeds(self) -> WorkerSpeeds:
        with self._worker:
            self._say("forward passes")
            curve = self._curve()
            plain = ReplayMachine(self._flops(curve), curve=curve, cut_seconds=0.0)
            self._say("requests")
            request = max(0.0, self._median(lambda: self._beside(plain, PAGE_SIZE - 1)))
            lengths = [length for length in (300, 600, 1000) if length < self._context]
            cut = max(0.0, statistics.median(
                self._median(lambda n=n: self._beside(plain, n)) - request for n in lengths  # type: ignore[misc]
            ))  # fmt: skip
            decode = self._median(self._token)
            self._say("loads from the host")
            host = self._loads([Tier.DEVICE])
            self._say("loads from the store")
            disk = self._loads([Tier.DEVICE, Tier.HOST])
        geometries = self._worker.geometries
        profile = replace(
            self._profile,
            kv_bytes_per_token=geometries[PoolName.KV].nbytes // PAGE_SIZE
            if PoolName.KV in geometries
            else 0,
            state_bytes=sum(g.nbytes for name, g in geometries.items() if name is not PoolName.KV),
        )
        machine = replace(
            plain,
            request_seconds=request, cut_seconds=cut, decode_seconds_per_request=decode,
            host_bandwidth=host[0], host_latency=max(0.0, host[1] - request),
            disk_bandwidth=disk[0], disk_latency=max(0.0, disk[1] - request),
        )  # fmt: skip
        return WorkerSpeeds(machine, profile)

    def _median(self, measured: Callable[[], float]) -> float:
        return statistics.median(measured() for _ in range(self._repeats))

    def _tokens(self, length: int) -> TokenArray:
        """Return a prompt that shares no page with others."""
        return self._random.integers(0, self._vocabulary, length, dtype=np.uint64)

    def _pass(self, length: int, start: int = 0) -> float:
        """Return the seconds of one forward pass behind `start` tokens."""
        runner, tokens = self._worker.runner, self._tokens(start + length)
        cache = runner.new_cache()
        if start:
            runner.prefill(cache, tokens[:start])
        self._worker.stream.synchronize()
        began = time.perf_counter()
        runner.prefill(cache, tokens, start)
        self._worker.stream.synchronize()
        return time.perf_counter() - began

    def _curve(self) -> tuple[tuple[int, float], ...]:
        """Return the curve of `ReplayMachine`; a shorter pass never takes longer than a longer one."""
        found: list[tuple[int, float]] = []
        for length in (n for n in _PASSES if n <= self._context):
            self._pass(length)  # the first pass of each length allocates memory
            seconds = self._median(lambda n=length: self._pass(n))  # type: ignore[misc]
            found.append((length, max(seconds, found[-1][1] if found else 0.0)))
        return tuple(found)

    def _flops(self, curve: Sequence[tuple[int, float]]) -> float:
        """Return the FLOPs per second of attention to earlier tokens, or those of the longest pass."""
        start, (last, seconds) = self._context - _PIECE, curve[-1]
        alone = next(time for length, time in curve if length == _PIECE)
        longer = self._median(lambda: self._pass(_PIECE, start)) - alone
        whole, new = self._profile.flops(start, start + _PIECE), self._profile.flops(0, _PIECE)
        if longer > 0.05 * alone and whole > new:
            return (whole - new) / longer
        return self._profile.flops(0, last) / seconds

    def _serve(self, tokens: TokenArray, new_tokens: int = 1) -> Generation:
        generation = self._worker.serve(tokens, new_tokens)
        self._worker.synchronize()
        self._worker.controller.flush()
        return generation

    def _beside(self, machine: ReplayMachine, length: int) -> float:
        """Return the seconds to the first token of a new prompt, without those of its forward passes."""
        generation = self._serve(self._tokens(length))
        passes = machine.prefill(self._profile, 0, length, generation.bounds[:-1])
        return generation.ttft_seconds - sum(passes)

    def _token(self) -> float:
        """Return the seconds per token of an answer to a prompt of average length."""
        tokens = self._tokens(self._context // 4)
        began = time.perf_counter()
        generation = self._worker.serve(tokens, _ANSWER)
        self._worker.stream.synchronize()
        seconds = time.perf_counter() - began
        self._serve(self._tokens(PAGE_SIZE))
        return (seconds - generation.ttft_seconds) / (_ANSWER - 1)

    def _loads(self, emptied: Sequence[Tier]) -> tuple[float, float]:
        """Return the bandwidth in bytes per second of loads, and their latency, by loads of two sizes."""
        points = []
        for length in (4 * PAGE_SIZE + 1, self._context // PAGE_SIZE * PAGE_SIZE + 1 - PAGE_SIZE):
            tokens = self._tokens(length)
            self._serve(tokens)
            found = [self._restored(tokens, emptied) for _ in range(self._repeats)]
            points.append((found[0][0], statistics.median(seconds for _, seconds in found)))
        (small, fast), (large, slow) = points
        bandwidth = (large - small) / max(slow - fast, 1e-6)
        return bandwidth, max(0.0, fast - small / bandwidth)

    def _restored(self, tokens: TokenArray, emptied: Sequence[Tier]) -> tuple[int, float]:
        """Return the bytes of one restore, and its seconds."""
        for tier in emptied:
            self._worker.controller.evict(tier)
        generation = self._serve(tokens)
        geometries = self._worker.geometries
        nbytes = sum(n * geometries[pool].nbytes for (_, pool), n in generation.sources.objects.items())
        return nbytes, generation.restore_seconds
