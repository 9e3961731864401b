"""The serving half of `tiercache demo`; it runs in a process of its own so that it can be killed.

It reads a `Plan` as JSON from standard input and writes events as JSON lines to standard output: `start` (how many steps will come),
`step`, `row`, `settled` (everything committed is on disk; the process may be killed from here on), `summary`.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Tier, TokenArray
from tiercache.errors import ConfigError
from tiercache.integrations.transformers.audit import Audit, Run, Verdict
from tiercache.integrations.transformers.identity import identity_of
from tiercache.integrations.transformers.request import Generation
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.small import build_small_hybrid
from tiercache.integrations.transformers.stream import TorchStream, compute_repeatably, describe, find_device
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.registry import open_backend

PAGE_SIZE: Final = 64
"""Tokens in one page."""
ANSWER_TOKENS: Final = 48
"""Tokens of one answer."""
QUESTION_TOKENS: Final = 160
"""Tokens of one question."""
SYSTEM_TOKENS: Final = 512
"""Tokens of the system prompt."""
REPEATS: Final = 5
"""Number of times that each measurement is taken; medians are shown."""
TIER_NAMES: Final = {None: "none", Tier.DEVICE: "device", Tier.HOST: "host"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one process of the demonstration.

    `phase` is `serve` for the first process and `restart` for the second. Where `device_bytes` or `host_bytes` is 0, a size is chosen so
    that every tier is needed. `storage` is the URL of a store that both processes may have open at once, such as a daemon's. Without it
    each process opens a file store in `directory`, so the first must be killed before the second begins. `device` says where the model
    is: `cpu`, `cuda` or `cuda:N`.
    """

    phase: str
    directory: str
    model: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 1 << 30
    turns: int = 4
    conversations: int = 4
    context: int = 4096
    storage: str = ""
    device: str = "cpu"

    @property
    def store(self) -> str:
        """The name of the lowest tier, for rows and figures."""
        return "storage" if self.storage else "disk"


class Conversations:
    """Conversations about real text, all behind one system prompt; the text is the documentation topics that come with Python.

    Thread safety: one owner thread.
    """

    def __init__(self, encode: Callable[[str], list[int]], count: int) -> None:
        from pydoc_data.topics import topics

        self._text = encode("\n\n".join(f"# {name}\n{topics[name]}" for name in sorted(topics)))
        self.system = self._text[:SYSTEM_TOKENS]
        self.histories: list[list[int]] = [list(self.system) for _ in range(count)]
        self._asked = SYSTEM_TOKENS

    def ask(self, conversation: int) -> TokenArray:
        """Append the next question to a conversation; return the prompt."""
        question = self._take(QUESTION_TOKENS)
        self.histories[conversation] += question
        return np.array(self.histories[conversation], np.uint64)

    def hear(self, conversation: int, answer: Iterable[int]) -> None:
        """Append an answer to a conversation."""
        self.histories[conversation] += answer

    def long_prompt(self, tokens: int) -> TokenArray:
        """Return a prompt of `tokens` tokens that has nothing in common with the conversations."""
        return np.array(self._take(tokens), np.uint64)

    def _take(self, tokens: int) -> list[int]:
        taken = [self._text[(self._asked + n) % len(self._text)] for n in range(tokens)]
        self._asked += tokens
        return taken


def emit(event: str, **values: Any) -> None:
    """Write one event for the parent process."""
    print(json.dumps({"event": event, **values}), flush=True)  # noqa: T201  standard output is the channel


def zigzag(conversations: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield (conversation, turn): the conversations in order on even turns, in reverse on odd turns.

    The distance between two visits to a conversation then takes many values, so that every tier is needed.
    """
    for turn in range(turns):
        order = range(conversations)
        for conversation in order if turn % 2 == 0 else reversed(order):
            yield conversation, turn


class Session:
    """One process of the demonstration.

    Thread safety: one owner thread.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._device = find_device(plan.device)
        if self._device.type == "cuda":
            compute_repeatably()
        self._model, encode = load_model(plan.model, self._device)
        self._require_positions()
        self._talk = Conversations(encode, plan.conversations)
        self._runs = Path(plan.directory) / "demo-runs.jsonl"
        runner = ModelRunner(self._model, PAGE_SIZE)
        self._identity = replace(identity_of(self._model, runner, PAGE_SIZE), tenant="demo", salt=self._salt())
        self._worker = self._open(*self._small_pools())
        self._audit = Audit(self._worker.runner, *self._audit_slots())

    def serve(self) -> None:
        """Run the first process: all turns of all conversations, then wait to be killed, or end when the parent process is gone.

        Without a shared store it goes on serving prompts until then.
        """
        order = list(zigzag(self._plan.conversations, self._plan.turns))
        about = [describe(self._device), self._worker.engine_report, self._worker.sizes]
        emit("start", steps=len(order), about=[line for line in about if line])
        for conversation, turn in order:
            self._turn("serve", conversation, turn)
        self._worker.controller.flush()
        emit("settled")
        parent = os.getppid()
        while os.getppid() == parent:  # ends by itself once the parent, which would kill it, is gone
            if self._plan.storage:
                time.sleep(0.1)  # this process and its session with the store stay while the second one works
            else:  # keep working, so that the kill interrupts a request
                self._worker.serve(self._talk.long_prompt(QUESTION_TOKENS), ANSWER_TOKENS)

    def restart(self) -> None:
        """Run the second process: recompute the runs of the first, continue its conversations, then measure the speed of a restore.

        The last conversation takes two turns, so that the table shows a restore from the device even if each process visits every
        conversation only once.
        """
        runs = [json.loads(line) for line in self._runs.read_text().splitlines()[1:]]
        emit("start", steps=len(runs) + self._plan.conversations + 1 + len(self._timed()), about=[])
        for record in runs:
            run = Run.from_json(record["run"])
            self._audit.replay(run)
            self._talk.ask(record["conversation"])
            self._talk.hear(record["conversation"], run.tokens[run.prompt_tokens :])
            emit("step", what="recompute what the first process computed")
        for conversation in range(self._plan.conversations):
            self._turn("restart", conversation, self._plan.turns)
        self._turn("restart", self._plan.conversations - 1, self._plan.turns + 1)
        self._worker.close()
        self._measure()

    def _turn(self, phase: str, conversation: int, turn: int) -> None:
        prompt = self._talk.ask(conversation)
        timed([lambda: uncut_prefill(self._worker.runner, prompt)], self._worker.stream)  # warm up: the first forward of a length allocates
        generation = self._worker.serve(prompt, ANSWER_TOKENS, audit=True)
        self._talk.hear(conversation, generation.answer.tolist())
        recompute, uncut = timed([lambda: uncut_prefill(self._worker.runner, prompt)] * REPEATS, self._worker.stream)
        verdict = self._audit.check(generation, uncut)
        with self._runs.open("a") as file:
            file.write(json.dumps({"conversation": conversation, "run": verdict.run.to_json()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._emit_row(
            phase, conversation, turn, generation, self._bytes(generation), generation.ttft_seconds, recompute,
            max_logit_diff=verdict.max_logit_diff,
            max_logit_diff_uncut=verdict.max_logit_diff_uncut,
            same_text=verdict.same_text,
            same_bytes=verdict.same_bytes,
        )  # fmt: skip

    def _measure(self) -> None:
        """Time restores of `context` tokens from host and from the lowest tier, interleaved with recomputing them; emit the summary.

        The prompt has one token more than `context`; computing that token gives the first logits.
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
        """Return the phases of restores to time, each with the tiers to empty before every restore.

        With a store of another process there is no cold phase: the page cache of its files cannot be dropped from here.
        """
        both = [Tier.DEVICE, Tier.HOST]
        timed = {"speed-host": [Tier.DEVICE], f"speed-{self._plan.store}": both}
        return timed if self._plan.storage else timed | {"speed-disk-cold": both}

    def _speed(self, phase: str, evict: list[Tier], prompt: TokenArray, filled: Verdict) -> dict[str, float]:
        """Time `REPEATS` restores and recomputes, emit their row, and return the figures for the summary."""
        restores: list[Generation] = []
        recomputes: list[float] = []
        raw: list[float] = []
        uncut = torch.empty(0)
        for _ in range(REPEATS):
            self._worker.synchronize()  # wait for the last request: pages that it still holds cannot be evicted
            for tier in evict:
                self._worker.controller.evict(tier)
            if phase.endswith("cold"):
                drop_page_cache(Path(self._plan.directory))
            restores.append(self._worker.serve(prompt, 1, audit=True))
            seconds, uncut = timed([lambda: uncut_prefill(self._worker.runner, prompt)], self._worker.stream)
            recomputes.append(seconds)
            if not self._plan.storage:
                raw.append(raw_read_seconds(Path(self._plan.directory), self._bytes(restores[-1])))
        median = sorted(restores, key=lambda g: g.ttft_seconds)[REPEATS // 2]
        recompute = statistics.median(recomputes)
        verdicts = [filled, *(self._audit.check(g, uncut) for g in restores)]
        self._emit_row(
            phase, -1, 0, median, self._bytes(median), median.ttft_seconds, recompute,
            max_logit_diff=max(v.max_logit_diff for v in verdicts),
            max_logit_diff_uncut=max(v.max_logit_diff_uncut for v in verdicts),
            same_text=all(v.same_text for v in verdicts),
            same_bytes=all(v.same_bytes for v in verdicts),
        )  # fmt: skip
        if phase == "speed-host":
            return {"speedup_host": recompute / median.ttft_seconds}
        if phase == "speed-disk-cold":
            return {"speedup_disk_cold": recompute / median.ttft_seconds}
        nbytes = self._bytes(median)
        figures = {
            f"speedup_{self._plan.store}": recompute / median.ttft_seconds,
            "restore_gbps": nbytes / statistics.median(g.restore_seconds for g in restores) / 1e9,
        }
        return figures | ({"raw_read_gbps": nbytes / statistics.median(raw) / 1e9} if raw else {})

    def _emit_row(
        self, phase: str, conversation: int, turn: int, g: Generation, nbytes: int, ttft: float, recompute: float, **checks: Any
    ) -> None:
        """Write one row of the table."""
        emit(
            "row", phase=phase, conversation=conversation, turn=turn, tier=TIER_NAMES.get(g.tier, self._plan.store),
            tokens_prompt=g.prompt_tokens, tokens_restored=g.restored, bytes_restored=nbytes, restore_ms=g.restore_seconds * 1e3,
            ttft_ms=ttft * 1e3, ttft_recompute_ms=recompute * 1e3, reason=str(g.reason), **checks,
        )  # fmt: skip

    def _bytes(self, generation: Generation) -> int:
        geometries = self._worker.runner.layout.geometries
        return sum(n * geometries[pool].nbytes for (_, pool), n in generation.sources.objects.items())

    def _open(self, device_bytes: int, host_bytes: int) -> Worker:
        section = {"type": "file", "path": str(Path(self._plan.directory).absolute() / "store"), "capacity": self._plan.disk_bytes}
        storage = open_backend(self._plan.storage or section)
        return Worker(
            self._model, device_bytes=device_bytes, host_bytes=host_bytes, storage=storage, page_size=PAGE_SIZE,
            identity=self._identity, options=ControllerOptions(restore_deadline=30.0),
        )  # fmt: skip

    def _longest(self) -> int:
        """Return the tokens of the longest conversation, after all turns of both processes."""
        return SYSTEM_TOKENS + (self._plan.turns + 2) * (QUESTION_TOKENS + ANSWER_TOKENS)

    def _salt(self) -> bytes:
        """Return the salt that keeps this demonstration's objects apart from those of earlier ones in the same directory.

        The runs of earlier demonstrations are not known here, so their objects could not be audited. The first process draws the salt
        and writes it to the first line of the file of runs; the second process reads it there.
        """
        if self._plan.phase == "serve":
            self._runs.write_text(json.dumps({"demonstration": secrets.token_hex(8)}) + "\n")
        return bytes.fromhex(json.loads(self._runs.read_text().splitlines()[0])["demonstration"])

    def _require_positions(self) -> None:
        """Raise ConfigError if a sequence would be longer than the model's positions reach."""
        reach = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = {"--context": self._plan.context + 1, "--turns": self._longest()}
        for option, tokens in longest.items():
            if reach is not None and tokens > reach:
                raise ConfigError(
                    f"{option} makes sequences of {tokens} tokens and the model's positions end at {reach}; choose a smaller one"
                )

    def _small_pools(self) -> tuple[int, int]:
        """Return the bytes of the device and host pools, those of the plan or, where these are 0, defaults.

        By default the device holds a little more than one conversation (of a model with states, which take half of the bytes) and the
        host about two. Raises ConfigError for sizes of the plan that do not hold one conversation.
        """
        geometries = ModelRunner(self._model, PAGE_SIZE).layout.geometries
        page = geometries[PoolName.KV].padded_nbytes
        state = geometries[PoolName.MAMBA].padded_nbytes if PoolName.MAMBA in geometries else 0
        pages = -(-self._longest() // PAGE_SIZE)
        least_device = max(2 * pages * page, pages * page + 8 * state) if state else pages * page
        # On the host, a request needs room for all that it restores and for what its last commit copies down.
        least_host = pages * page + 4 * state
        device = self._plan.device_bytes or max(2 * pages * page, least_device)
        host = self._plan.host_bytes or 2 * least_host
        if device < least_device:
            raise ConfigError(f"--device-bytes {device} do not hold one conversation of {pages} pages; give at least {least_device}")
        if host < least_host:
            raise ConfigError(f"--host-bytes {host} do not hold one conversation of {pages} pages; give at least {least_host}")
        return device, host

    def _ample_pools(self) -> tuple[int, int]:
        geometries = self._worker.runner.layout.geometries
        needed = sum((self._plan.context // PAGE_SIZE + 2 if p is PoolName.KV else 12) * g.padded_nbytes for p, g in geometries.items())
        return max(2 * needed, self._plan.device_bytes), max(2 * needed, self._plan.host_bytes)

    def _audit_slots(self) -> tuple[int, int]:
        requests = self._plan.conversations * (self._plan.turns + 1) + 1
        return requests * -(-self._longest() // PAGE_SIZE) + 2 * (self._plan.context // PAGE_SIZE) + 64, 6 * requests + 64


def load_model(path: str, device: torch.device | None = None) -> tuple[PreTrainedModel, Callable[[str], list[int]]]:
    """Load the model of a local directory onto `device` (default: the CPU) and return it with the function that encodes text.

    An empty `path` gives the small hybrid model, whose tokens are bytes. Raises ConfigError if the directory holds no model or no
    tokenizer, and if the model does not fit into the device's memory.
    """
    if not path:
        return _moved(build_small_hybrid(), device), lambda text: list(text.encode())
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model {path} holds no config.json; pass a directory that `save_pretrained` or a download made")
    model = _loaded(path, "causal language model", lambda: AutoModelForCausalLM.from_pretrained(path, local_files_only=True))
    tokenizer = _loaded(path, "tokenizer", lambda: AutoTokenizer.from_pretrained(path, local_files_only=True))
    # No begin and end tokens: the text is cut into many prompts.
    return _moved(model, device), lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _moved(model: PreTrainedModel, device: torch.device | None) -> PreTrainedModel:
    try:
        torch.nn.Module.to(model, device)  # in place
        return model
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model does not fit into the memory of {device}; choose a smaller one, or another device") from error


def _loaded(path: str, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # what a loader raises depends on the file that it stumbles over
        first = str(error).strip().partition("\n")[0].rstrip(" :")
        raise ConfigError(f"--model {path} holds no {what} that transformers can load: {first or type(error).__name__}") from error


def uncut_prefill(runner: ModelRunner, prompt: TokenArray) -> torch.Tensor:
    """Compute a prompt as a server without a cache would; return the last position's logits."""
    return runner.prefill(runner.new_cache(), prompt)


def timed(calls: list[Callable[[], torch.Tensor]], stream: TorchStream) -> tuple[float, torch.Tensor]:
    """Return the median seconds that `calls` take until their results are there, and the result of the last call."""
    seconds, result = [], torch.empty(0)
    stream.synchronize()
    for call in calls:
        started = time.perf_counter()
        result = call()
        stream.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def drop_page_cache(directory: Path) -> None:
    """Ask the kernel to forget the files of `directory`, so that the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def raw_read_seconds(directory: Path, nbytes: int) -> float:
    """Return the seconds of one plain read of `nbytes`, the least that a warm restore can take.

    It reads the store's largest file into memory that has been touched, after having read it once. If the file is shorter than `nbytes`,
    the time is scaled up.
    """
    largest = max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    buffer = memoryview(bytearray(min(nbytes, largest.stat().st_size)))
    fd = os.open(largest, os.O_RDONLY)
    try:
        os.preadv(fd, [buffer], 0)
        started = time.perf_counter()
        os.preadv(fd, [buffer], 0)
        return (time.perf_counter() - started) * nbytes / len(buffer)
    finally:
        os.close(fd)


def main() -> None:
    """Run the phase that the plan on standard input names."""
    session = Session(Plan(**json.load(sys.stdin)))
    session.serve() if session._plan.phase == "serve" else session.restart()


if __name__ == "__main__":
    main()
