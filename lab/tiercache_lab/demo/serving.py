"""The server process of `tiercache demo`, which the command starts and kills.

The process reads a `DemoPlan` as JSON from standard input. It writes events as JSON lines to standard output:

- `start`, with the number of steps that will follow, and the names of the tiers of the store
- `step`, the end of a step without a row
- `run`, how one request was computed, for `DemoPlan.runs`
- `row`, the figures of one request
- `settled`: all committed objects are stored, so that the process may be killed
- `summary`, the speeds of restores
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Tier, TokenArray
from tiercache.errors import ConfigError, StorageError
from tiercache.geometry import Geometry
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.stream import TorchStream, compute_repeatably, describe, find_device
from tiercache.integrations.transformers.watch import identity_of
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.registry import open_backend, spec_of
from tiercache_lab.bench.machine import drop
from tiercache_lab.demo.audit import Audit, AuditedRun, AuditVerdict
from tiercache_lab.demo.small import build_small_hybrid

PAGE_SIZE: Final = 64
ANSWER_TOKENS: Final = 48
QUESTION_TOKENS: Final = 160
SYSTEM_TOKENS: Final = 512
REPEATS: Final = 5
"""Number of runs of each measurement, whose median is shown."""
TIER_NAMES: Final = {None: "none", Tier.DEVICE: "device", Tier.HOST: "host"}
"""Names of tiers in rows. Those below the host are named by the chain, or else by `DemoPlan.store`."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Plan of one process of the demonstration."""

    phase: str
    """`serve` for the first process, `restart` for the second."""
    directory: str
    """Directory of the file store."""
    salt: str
    """Salt of all keys, in hexadecimal digits. A directory may still have objects of earlier demonstrations,
    whose restores could not be checked."""
    model: str = ""
    """Directory of the model; empty for the small hybrid model."""
    disk_bytes: int = 1 << 30
    turns: int = 4
    """Number of turns of each conversation in the first process."""
    conversations: int = 4
    context: int = 4096
    """Tokens of the prompt whose restore is timed."""
    storage: Sequence[str] = ()
    """URL of the store; several are a chain of tiers, none is a file store in `directory`."""
    shared: bool = False
    """Whether both processes may have the store open at once. Otherwise the first process must be killed
    before the second begins."""
    runs: Sequence[Mapping[str, Any]] = ()
    """Events `run` of the first process, for the second."""
    device: str = "cpu"
    """Device of the model: `cpu`, `cuda` or `cuda:N`."""

    @property
    def store(self) -> str:
        """Name of the lowest tier in rows and figures."""
        return "storage" if self.storage else "disk"


class Conversations:
    """Conversations that share a system prompt. Their text comes from the topics of Python's documentation.

    Thread safety: one owner thread.
    """

    def __init__(self, encode: Callable[[str], list[int]], count: int) -> None:
        from pydoc_data.topics import topics

        self._text = encode("\n\n".join(f"# {name}\n{topics[name]}" for name in sorted(topics)))
        self.system = self._text[:SYSTEM_TOKENS]
        self.histories: list[list[int]] = [list(self.system) for _ in range(count)]
        self._asked = SYSTEM_TOKENS

    def ask(self, conversation: int) -> TokenArray:
        """Append the next question to a conversation, and return the whole conversation as a prompt."""
        question = self._take(QUESTION_TOKENS)
        self.histories[conversation] += question
        return np.array(self.histories[conversation], np.uint64)

    def add_answer(self, conversation: int, answer: Iterable[int]) -> None:
        """Append an answer to a conversation."""
        self.histories[conversation] += answer

    def long_prompt(self, tokens: int) -> TokenArray:
        """Return a prompt of `tokens` tokens that shares no beginning with a conversation."""
        return np.array(self._take(tokens), np.uint64)

    def _take(self, tokens: int) -> list[int]:
        taken = [self._text[(self._asked + n) % len(self._text)] for n in range(tokens)]
        self._asked += tokens
        return taken


def emit(event: str, **values: Any) -> None:
    """Write one event for the parent process."""
    print(json.dumps({"event": event, **values}), flush=True)  # noqa: T201  the parent reads stdout


def zigzag(conversations: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield (conversation, turn) for all turns, with the conversations in reverse order on odd turns.

    The number of requests between two turns of a conversation then varies, so that every tier is needed:

        turn 0: 0 1 2 3    turn 1: 3 2 1 0    turn 2: 0 1 2 3
    """
    for turn in range(turns):
        order = range(conversations)
        for conversation in order if turn % 2 == 0 else reversed(order):
            yield conversation, turn


class Session:
    """Work of one process of the demonstration. Thread safety: one owner thread."""

    def __init__(self, plan: DemoPlan) -> None:
        self._plan = plan
        self._device = find_device(plan.device)
        if self._device.type == "cuda":
            compute_repeatably()
        # Threads that share small products wait for each other: on a busy CPU that takes ten times as long.
        if not plan.model and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self._model, encode = load_model(plan.model, self._device)
        self._require_positions()
        self._talk = Conversations(encode, plan.conversations)
        runner = ModelRunner(self._model, PAGE_SIZE)
        self._identity = replace(
            identity_of(self._model, runner, PAGE_SIZE), tenant="demo", salt=bytes.fromhex(plan.salt)
        )
        self._worker = self._open(*self._small_pools())
        self._audit = Audit(self._worker.runner, *self._audit_slots())

    def serve(self) -> None:
        """Run the first process: serve all turns of all conversations, then wait to be killed.

        If the store is not shared, the process serves more prompts while it waits. It ends with its parent
        process.
        """
        order = list(zigzag(self._plan.conversations, self._plan.turns))
        about = [describe(self._device), self._worker.engine_report, self._worker.sizes]
        emit("start", steps=len(order), about=[line for line in about if line], tiers=self._tier_names())
        for conversation, turn in order:
            self._turn("serve", conversation, turn)
        self._worker.controller.flush()
        emit("settled")
        parent = os.getppid()
        while os.getppid() == parent:  # a parent that has ended can no longer kill this process
            if self._plan.shared:
                # The session with the store stays open while the second process works.
                time.sleep(0.1)
            else:
                # Further requests make sure that the kill interrupts a request.
                self._worker.serve(self._talk.long_prompt(QUESTION_TOKENS), ANSWER_TOKENS)

    def restart(self) -> None:
        """Run the second process.

        It recomputes the runs of the first process, continues the conversations, and measures the speed of
        restores. The last conversation has two turns in a row, so that the second of these two turns is
        restored from the device. With `turns` = 1, no other request need be restored from there.
        """
        steps = len(self._plan.runs) + self._plan.conversations + 1 + len(self._timed())
        emit("start", steps=steps, about=[], tiers=self._tier_names())
        for record in self._plan.runs:
            run = AuditedRun.from_json(record["run"])
            self._audit.recompute(run)
            self._talk.ask(record["conversation"])
            self._talk.add_answer(record["conversation"], run.tokens[run.prompt_tokens :])
            emit("step", what="recompute what the first process computed")
        for conversation in range(self._plan.conversations):
            self._turn("restart", conversation, self._plan.turns)
        self._turn("restart", self._plan.conversations - 1, self._plan.turns + 1)
        self._worker.close()
        self._measure()

    def _turn(self, phase: str, conversation: int, turn: int) -> None:
        prompt = self._talk.ask(conversation)
        before = self._tiers()
        # Warm up: the first forward pass of each length allocates memory.
        timed([lambda: uncut_prefill(self._worker.runner, prompt)], self._worker.stream)
        generation = self._worker.serve(prompt, ANSWER_TOKENS, audit=True)
        self._talk.add_answer(conversation, generation.answer.tolist())
        recompute, uncut = timed(
            [lambda: uncut_prefill(self._worker.runner, prompt)] * REPEATS, self._worker.stream
        )
        verdict = self._audit.check(generation, uncut)
        emit("run", conversation=conversation, run=verdict.run.to_json())
        self._emit_row(phase, conversation, turn, generation, recompute, before, [verdict])

    def _measure(self) -> None:
        """Time restores of `context` tokens from the host and from the lowest tier, and emit the summary.

        Restores and recomputes take turns. The prompt has one token more than `context`. The prefill of this
        token gives the first logits.
        """
        prompt = self._talk.long_prompt(self._plan.context + 1)
        self._worker = self._open(*self._ample_pools())
        first = self._worker.serve(prompt, 1, audit=True)
        self._worker.controller.flush()
        filled = self._audit.check(first)
        figures: dict[str, float] = {}
        for phase, tiers in self._timed().items():
            figures |= self._speed(phase, tiers, prompt, filled)
        emit("summary", **figures)
        self._worker.close()

    def _timed(self) -> dict[str, list[Tier]]:
        """Return the phases of timed restores, each with the tiers that are emptied before every restore.

        If the store belongs to another process, there is no cold phase, because this process cannot drop the
        store's files from the page cache.
        """
        both = [Tier.DEVICE, Tier.HOST]
        timed = {"speed-host": [Tier.DEVICE], f"speed-{self._plan.store}": both}
        return timed if self._plan.storage else timed | {"speed-disk-cold": both}

    def _speed(
        self, phase: str, evict: list[Tier], prompt: TokenArray, filled: AuditVerdict
    ) -> dict[str, float]:
        """Time `REPEATS` restores and recomputes, emit one row, and return the figures for the summary."""
        restores: list[Generation] = []
        recomputes: list[float] = []
        uncut = torch.empty(0)
        before = self._tiers()
        for _ in range(REPEATS):
            # The previous request must be over, because pages that it still holds cannot be evicted.
            self._worker.synchronize()
            for tier in evict:
                self._worker.controller.evict(tier)
            if phase.endswith("cold"):
                drop(Path(self._plan.directory))
            restores.append(self._worker.serve(prompt, 1, audit=True))
            seconds, uncut = timed([lambda: uncut_prefill(self._worker.runner, prompt)], self._worker.stream)
            recomputes.append(seconds)
        median = sorted(restores, key=lambda g: g.ttft_seconds)[REPEATS // 2]
        recompute = statistics.median(recomputes)
        verdicts = [filled, *(self._audit.check(g, uncut) for g in restores)]
        self._emit_row(phase, -1, 0, median, recompute, before, verdicts)
        name = phase.removeprefix("speed-").replace("-", "_")
        figures = {f"speedup_{name}": recompute / median.ttft_seconds}
        if phase == f"speed-{self._plan.store}":
            seconds = statistics.median(g.restore_seconds for g in restores)
            figures["restore_gbps"] = self._bytes(median) / seconds / 1e9
        return figures

    def _emit_row(
        self,
        phase: str,
        conversation: int,
        turn: int,
        g: Generation,
        recompute: float,
        before: Mapping[str, int],
        verdicts: Sequence[AuditVerdict],
    ) -> None:
        """Write one row of the table. `before`: what `_tiers` returned before the request."""
        emit(
            "row", phase=phase, conversation=conversation, turn=turn, tier=self._answered(g, before),
            tokens_prompt=g.prompt_tokens, tokens_restored=g.restored, bytes_restored=self._bytes(g),
            restore_ms=g.restore_seconds * 1e3,
            ttft_ms=g.ttft_seconds * 1e3, ttft_recompute_ms=recompute * 1e3, reason=str(g.reason),
            max_logit_diff=max(v.max_logit_diff for v in verdicts),
            max_logit_diff_uncut=max(v.max_logit_diff_uncut for v in verdicts),
            same_text=all(v.same_text for v in verdicts), same_bytes=all(v.same_bytes for v in verdicts),
        )  # fmt: skip

    def _bytes(self, generation: Generation) -> int:
        """Return the bytes that were restored for a request."""
        geometries = self._worker.runner.layout.geometries
        return sum(n * geometries[pool].nbytes for (_, pool), n in generation.sources.objects.items())

    def _tiers(self) -> dict[str, int]:
        """Return how many objects each tier of the store has read; nothing if the store has no tiers."""
        try:
            return {tier.name: tier.read_objects for tier in self._store.usage().tiers}
        except StorageError:  # a daemon tells its tiers only to those who may know them
            return {}

    def _tier_names(self) -> list[str]:
        return list(self._tiers()) or [self._plan.store]

    def _answered(self, generation: Generation, before: Mapping[str, int]) -> str:
        """Return the name of the slowest tier from which a request was restored."""
        if generation.tier in TIER_NAMES:
            return TIER_NAMES[generation.tier]
        read = [name for name, count in self._tiers().items() if count > before.get(name, 0)]
        return read[-1] if read else self._plan.store

    def _open(self, device_bytes: int, host_bytes: int) -> Worker:
        path = Path(self._plan.directory).absolute() / "store"
        own = {"type": "file", "path": str(path), "capacity": self._plan.disk_bytes}
        self._store = open_backend(spec_of(self._plan.storage) if self._plan.storage else own)
        return Worker(
            self._model, device_bytes=device_bytes, host_bytes=host_bytes, storage=self._store,
            page_size=PAGE_SIZE,
            identity=self._identity, options=ControllerOptions(restore_deadline=30.0),
        )  # fmt: skip

    def _longest(self) -> int:
        """Return the length in tokens of a conversation after all turns of both processes."""
        return SYSTEM_TOKENS + (self._plan.turns + 2) * (QUESTION_TOKENS + ANSWER_TOKENS)

    def _require_positions(self) -> None:
        """Raise ConfigError if a sequence would have more tokens than the model has positions."""
        reach = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = {"--context": self._plan.context + 1, "--turns": self._longest()}
        for option, tokens in longest.items():
            if reach is not None and tokens > reach:
                raise ConfigError(
                    f"{option} makes sequences of {tokens} tokens, and the model supports {reach}; choose a"
                    " smaller value"
                )

    def _small_pools(self) -> tuple[int, int]:
        """Return the bytes of the device pools and of the host arena: room for about two conversations.

        If a model has states, they take half of the bytes on the device, and the rest has room for the pages
        of only about one conversation.
        """
        page, state = _object_bytes(ModelRunner(self._model, PAGE_SIZE).layout.geometries)
        pages = -(-self._longest() // PAGE_SIZE)
        # On the host a request needs room for all objects that it restores, and for its last write-through.
        return max(2 * pages * page, pages * page + 8 * state), 2 * (pages * page + 4 * state)

    def _ample_pools(self) -> tuple[int, int]:
        """Return sizes of the pools with which a restore of the timed prompt needs no evictions."""
        geometries = self._worker.runner.layout.geometries
        needed = sum(
            (self._plan.context // PAGE_SIZE + 2 if p is PoolName.KV else 12) * g.padded_nbytes
            for p, g in geometries.items()
        )
        return 2 * needed, 2 * needed

    def _audit_slots(self) -> tuple[int, int]:
        """Return upper bounds on the pages and states of all audited runs."""
        requests = self._plan.conversations * (self._plan.turns + 1) + 1
        return (
            requests * -(-self._longest() // PAGE_SIZE) + 2 * (self._plan.context // PAGE_SIZE) + 64,
            6 * requests + 64,
        )


def load_model(
    path: str, device: torch.device | None = None
) -> tuple[PreTrainedModel, Callable[[str], list[int]]]:
    """Return the model of a local directory, and a function that encodes text as tokens.

    The model is on `device` (default: the CPU). An empty `path` gives the small hybrid model, whose tokens
    are bytes. Raises ConfigError if the directory has no model or no tokenizer, or if the model does not fit
    into the device's memory.
    """
    if not path:
        return _move_to_device(build_small_hybrid(), device), lambda text: list(text.encode())
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--model {path} has no config.json; give a directory made by `save_pretrained` or by a download"
        )
    model = _load(
        path,
        "causal language model",
        lambda: AutoModelForCausalLM.from_pretrained(path, local_files_only=True),
    )
    tokenizer = _load(path, "tokenizer", lambda: AutoTokenizer.from_pretrained(path, local_files_only=True))
    # The text is cut into many prompts, so do not add tokens that mark its beginning or end.
    return _move_to_device(model, device), lambda text: list(
        tokenizer.encode(text, add_special_tokens=False, verbose=False)
    )


def _move_to_device(model: PreTrainedModel, device: torch.device | None) -> PreTrainedModel:
    try:
        torch.nn.Module.to(model, device)  # in place
        return model
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the model does not fit into the memory of {device}; choose a smaller one, or another device"
        ) from error


def _load(path: str, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # the type of the exception depends on the file that cannot be loaded
        first = str(error).strip().partition("\n")[0].rstrip(" :")
        raise ConfigError(
            f"--model {path} has no {what} that transformers can load: {first or type(error).__name__}"
        ) from error


def uncut_prefill(runner: ModelRunner, prompt: TokenArray) -> torch.Tensor:
    """Compute a prompt in one pass, as without a cache, and return the logits of the last position."""
    return runner.prefill(runner.new_cache(), prompt)


def timed(calls: list[Callable[[], torch.Tensor]], stream: TorchStream) -> tuple[float, torch.Tensor]:
    """Return the median seconds that `calls` take until their results are complete, and the last result."""
    seconds, result = [], torch.empty(0)
    stream.synchronize()
    for call in calls:
        started = time.perf_counter()
        result = call()
        stream.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def _object_bytes(geometries: Mapping[PoolName, Geometry]) -> tuple[int, int]:
    """Return the bytes of a page and of a state of all state pools; 0 for what the model does not keep."""
    sizes = {pool: geometry.padded_nbytes for pool, geometry in geometries.items()}
    return sizes.pop(PoolName.KV, 0), sum(sizes.values())


def main() -> None:
    """Read the plan from standard input and run its phase."""
    session = Session(DemoPlan(**json.load(sys.stdin)))
    session.serve() if session._plan.phase == "serve" else session.restart()


if __name__ == "__main__":
    main()
