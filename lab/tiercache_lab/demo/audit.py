"""The audit of answers: each generation is computed again from its tokens, without the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tiercache.core import TokenArray, as_tokens
from tiercache.errors import InputError, PoolFullError
from tiercache.integrations.transformers.requests.request import Chooser, Generation, Sampling
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.keys import page_keys


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """A record of how one request was computed, in plain numbers; depths are in tokens."""

    tokens: tuple[int, ...]
    """The prompt and the answer."""
    prompt_tokens: int
    restored: int
    """Depth after which the first forward pass began."""
    bounds: tuple[int, ...]
    """Depth at the end of each forward pass."""
    states: tuple[int, ...]
    """Depths at which states were kept."""
    parts: tuple[int, ...]
    """Origin of each restored page and, last, of the restored state. Several runs may have computed the same
    object (page or state). For each object, these runs are numbered from 0, in the order in which the audit
    checked them. The origin of a restored object is the number of the run that computed its bytes."""
    anew: int = 0
    """Depth up to which the sequence was computed again from an empty cache; 0 if it never was. A sequence is
    computed again when the answer grows beyond the worker's limit."""
    temperature: float = 0.0
    seed: int = 0
    """Seed and temperature of the `Sampling` by which the answer was chosen."""

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values, from which `from_json` can restore it in another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> AuditedRun:
        """Make a run from the values of `to_json`."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The comparison of a generation with its recomputation.

    Differences are the largest absolute differences of the logits at the first new token.
    """

    run: AuditedRun
    max_logit_diff: float
    """Difference to the recomputation with the same cuts."""
    max_logit_diff_uncut: float
    """Difference to an uncut prefill."""
    same_text: bool
    """Whether the answers are equal."""
    same_bytes: bool
    """Whether every restored page and state equals, bit for bit, a page or state of a recomputed run."""


class Audit:
    """Recomputed runs of one model, with which later generations are compared.

    `page_slots` and `state_slots` bound the memory of the audit.
    """

    def __init__(self, runner: ModelRunner, page_slots: int = 4096, state_slots: int = 512) -> None:
        self._runner = runner
        self._pool = runner.allocate_pools(page_slots, state_slots)
        # The slots of a page or state by its page key, one slot for each run that computed it.
        self._pages: dict[bytes, list[int]] = {}
        self._states: dict[bytes, list[int]] = {}
        self._free_page = 0
        self._free_state = 0

    def check(self, generation: Generation, uncut: torch.Tensor | None = None) -> AuditVerdict:
        """Recompute a generation and compare the two.

        `uncut` holds the first logits `[vocab]` of an uncut prefill; without it, that prefill is run here.
        Raises InputError for a generation that restored a state but was served without `audit`, or that
        restored something that no checked generation computed. Raises PoolFullError if the audit's memory is
        full.
        """
        if generation.restored and self._pool.states and not generation.restored_state:
            raise InputError(
                "this generation kept no copy of the state it restored; serve it with audit=True"
            )
        keys = self._keys(as_tokens(generation.tokens))[: generation.restored // self._runner.page_size]
        parts, same_bytes = self._find_parts(generation, keys)
        run = AuditedRun(
            tuple(generation.tokens.tolist()), generation.prompt_tokens, generation.restored,
            generation.bounds, generation.states, parts,
            generation.anew, generation.sampling.temperature, generation.sampling.seed,
        )  # fmt: skip
        first, answer = self.recompute(run)
        if uncut is None:
            uncut = self._runner.prefill(
                self._runner.new_cache(), generation.tokens[: generation.prompt_tokens]
            )
        return AuditVerdict(
            run,
            max_logit_diff=float((generation.first_logits - first).abs().max()),
            max_logit_diff_uncut=float((generation.first_logits - uncut).abs().max()),
            same_text=answer == tuple(generation.answer.tolist()),
            same_bytes=same_bytes,
        )

    def recompute(self, run: AuditedRun) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Recompute a run and keep its pages and states.

        Returns the first new token's logits and the answer.
        """
        tokens, page_size = as_tokens(list(run.tokens)), self._runner.page_size
        keys = self._keys(tokens)
        choose = Chooser(Sampling(run.temperature, run.seed))
        # 0 ........ restored .... bounds[0] .... bounds[1] .... bounds[-1]
        # |from the `parts`|  forward  |   forward   |   forward   |
        cache = self._build(keys[: run.restored // page_size], run.parts)
        first, start = torch.empty(0), run.restored
        answer: list[int] = []
        for end in run.bounds:
            if end == run.anew:
                self._keep_pages(cache, keys, run.restored // page_size, start // page_size)
                cache, start = self._runner.new_cache(), 0
            logits = self._runner.forward(cache, tokens[start:end], start)
            if end == run.prompt_tokens:
                first = logits
            if end >= run.prompt_tokens:
                answer.append(choose(logits))
            if end in run.states:
                self._keep_state(cache, keys[end // page_size - 1])
            start = end
        if not run.anew:
            self._keep_pages(cache, keys, run.restored // page_size, start // page_size)
        return first, tuple(answer)

    def _keys(self, tokens: TokenArray) -> list[bytes]:
        return page_keys(bytes(32), tokens, self._runner.page_size)

    def _build(self, keys: Sequence[bytes], parts: Sequence[int]) -> DynamicCache:
        if not keys:
            return self._runner.new_cache()
        if not all(key in self._pages for key in keys if self._pool.kv) or (
            self._pool.states and keys[-1] not in self._states
        ):
            raise InputError(
                "this generation restored a page or state that no checked generation computed; check"
                " generations in the order in which they were served"
            )
        pages = zip(keys, parts, strict=False) if self._pool.kv else ()
        slots = np.array([self._pages[key][part] for key, part in pages], np.int64)
        state = self._states[keys[-1]][parts[-1]] if self._pool.states else None
        tokens = len(keys) * self._runner.page_size
        return self._runner.restore(self._pool, slots, state, tokens=tokens)

    def _keep_pages(self, cache: DynamicCache, keys: Sequence[bytes], first: int, last: int) -> None:
        if not self._pool.kv:
            return
        if self._free_page + last - first > self._pool.page_slots:
            raise PoolFullError(f"the audit holds {self._pool.page_slots} pages; make it with more")
        slots = np.arange(self._free_page, self._free_page + last - first)
        self._free_page += last - first
        self._runner.export_pages(cache, self._pool, first, slots)
        for key, slot in zip(keys[first:last], slots.tolist(), strict=True):
            self._pages.setdefault(key, []).append(slot)

    def _keep_state(self, cache: DynamicCache, key: bytes) -> None:
        if self._free_state == self._pool.state_slots:
            raise PoolFullError(f"the audit holds {self._pool.state_slots} states; make it with more")
        self._runner.export_state(cache, self._pool, self._free_state)
        self._states.setdefault(key, []).append(self._free_state)
        self._free_state += 1

    def _find_parts(self, generation: Generation, keys: Sequence[bytes]) -> tuple[tuple[int, ...], bool]:
        """Find the run that computed each restored object, by comparing bytes.

        Returns the `parts` of the run, and whether a run was found for every object. Where no run was found,
        the part is 0.
        """
        held = [
            (self._pool.pages(t.layer, t.name), self._by_page(generation, t.layer, t.name))
            for t in self._runner.layout.kv_tensors()
        ]
        found = []
        for n, key in enumerate(keys if held else ()):
            found.append(
                _first_true(
                    all(torch.equal(pool[slot], pages[n]) for pool, pages in held)
                    for slot in self._pages.get(key, ())
                )
            )
        if keys and generation.restored_state:
            restored = generation.restored_state.items()
            found.append(
                _first_true(
                    all(torch.equal(self._pool.states[name][slot], tensor) for name, tensor in restored)
                    for slot in self._states.get(keys[-1], ())
                )
            )
        return tuple(max(part, 0) for part in found), all(part >= 0 for part in found)

    def _by_page(self, generation: Generation, layer: int, name: str) -> torch.Tensor:
        """Return the restored KV of one tensor, `[pages, page_size, heads, head_dim]`, from the live cache.

        The answer has made the cache longer since the restore, but has not changed the restored KV.
        """
        held = self._runner.layout.tensor_of(generation.cache, layer, name)[0, :, : generation.restored]
        return held.permute(1, 0, 2).reshape(-1, self._runner.page_size, held.shape[0], held.shape[2])


def _first_true(matches: Iterable[bool]) -> int:
    """Return the index of the first true value; -1 if there is none."""
    return next((n for n, match in enumerate(matches) if match), -1)
