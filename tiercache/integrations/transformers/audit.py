"""Checks a worker's answers by recomputing them, from the tokens alone, with the same cuts.

A cached sequence may be put together from several runs: pages that one request computed, and a state that another request took later,
after the same tokens but with other cuts. Rounding depends on the cuts, so "the same cuts" means the same cuts *for every part*. The audit
recomputes each run once, keeps all pages and states of the recomputation in plain memory, and builds every later run on those. It reads
bytes of the cache only to compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tiercache.core import TokenArray, as_tokens
from tiercache.errors import InputError, PoolFullError
from tiercache.integrations.transformers.request import Generation
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.keys import page_keys


@dataclass(frozen=True, slots=True)
class Run:
    """A record of how one request was computed, in plain numbers.

    The forward passes began after `restored` tokens and ended at `bounds`; `states` are the depths at which states were kept. `parts` says,
    for each restored page and last for the state, which of the runs that computed it gave it (0: the first). The forward pass that ends at
    `anew` began with an empty cache; 0 if there was none.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    restored: int
    bounds: tuple[int, ...]
    states: tuple[int, ...]
    parts: tuple[int, ...]
    anew: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values, from which `from_json` makes it again in another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Run:
        """Make a run from the values of `to_json`."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a generation with its recomputation.

    Logit differences are the largest absolute ones at the first new token: `max_logit_diff` to the recomputation with the same cuts,
    `max_logit_diff_uncut` to an uncut prefill. `same_text` says that the answers are equal, `same_bytes` that every restored page and
    state equals, bit for bit, one that the recomputation of a run gave.
    """

    run: Run
    max_logit_diff: float
    max_logit_diff_uncut: float
    same_text: bool
    same_bytes: bool


class Audit:
    """Recomputed runs of one model, to check later generations against; `page_slots` and `state_slots` bound its memory.

    Thread safety: one owner thread.
    """

    def __init__(self, runner: ModelRunner, page_slots: int = 4096, state_slots: int = 512) -> None:
        self._runner = runner
        self._pool = runner.allocate_pools(page_slots, state_slots)
        self._pages: dict[bytes, list[int]] = {}
        self._states: dict[bytes, list[int]] = {}
        self._free_page = 0
        self._free_state = 0

    def check(self, generation: Generation, uncut: torch.Tensor | None = None) -> Verdict:
        """Recompute a generation and compare the two.

        `uncut` are the first logits `[vocab]` of an uncut prefill, if the caller has them already; without them that prefill is run here.
        Raises InputError for a generation that was served without `audit`, or that restored something that no checked generation
        computed, and PoolFullError if the audit's memory is full.
        """
        if generation.restored and self._pool.states and not generation.restored_state:
            raise InputError("this generation kept no copy of the state it restored; serve it with audit=True")
        keys = self._keys(as_tokens(generation.tokens))[: generation.restored // self._runner.page_size]
        parts, same_bytes = self._find_parts(generation, keys)
        run = Run(
            tuple(generation.tokens.tolist()), generation.prompt_tokens, generation.restored, generation.bounds, generation.states, parts,
            generation.anew,
        )  # fmt: skip
        first, answer = self.replay(run)
        if uncut is None:
            uncut = self._runner.prefill(self._runner.new_cache(), generation.tokens[: generation.prompt_tokens])
        return Verdict(
            run,
            max_logit_diff=float((generation.first_logits - first).abs().max()),
            max_logit_diff_uncut=float((generation.first_logits - uncut).abs().max()),
            same_text=answer == tuple(generation.answer.tolist()),
            same_bytes=same_bytes,
        )

    def replay(self, run: Run) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Recompute a run and keep its pages and states; return the first new token's logits and the greedy answer."""
        tokens, page_size = as_tokens(list(run.tokens)), self._runner.page_size
        keys = self._keys(tokens)
        cache = self._build(keys[: run.restored // page_size], run.parts)
        first, answer, start = torch.empty(0), [], run.restored
        for end in run.bounds:
            if end == run.anew:
                self._keep_pages(cache, keys, run.restored // page_size, start // page_size)
                cache, start = self._runner.new_cache(), 0
            logits = self._runner.forward(cache, tokens[start:end], start)
            if end == run.prompt_tokens:
                first = logits
            if end >= run.prompt_tokens:
                answer.append(int(logits.argmax()))
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
        if not all(key in self._pages for key in keys) or (self._pool.states and keys[-1] not in self._states):
            raise InputError(
                "this generation restored what the audit has not seen computed; check generations in the order they were served"
            )
        slots = np.array([self._pages[key][part] for key, part in zip(keys, parts, strict=False)])
        state = self._states[keys[-1]][parts[-1]] if self._pool.states else None
        return self._runner.restore(self._pool, slots, state)

    def _keep_pages(self, cache: DynamicCache, keys: Sequence[bytes], first: int, last: int) -> None:
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
        """Find by its bytes which run each restored object is from; return the runs, and whether every object was found.

        An object that equals none is given as 0.
        """
        held = [(self._pool.pages(t.layer, t.name), self._by_page(generation, t.layer, t.name)) for t in self._runner.layout.kv_tensors()]
        found = [
            _first_equal(self._pages.get(key, []), lambda slot, n=n: all(torch.equal(pool[slot], pages[n]) for pool, pages in held))
            for n, key in enumerate(keys)
        ]
        if keys and generation.restored_state:
            candidates = self._states.get(keys[-1], [])
            found.append(
                _first_equal(
                    candidates, lambda slot: all(torch.equal(self._pool.states[n][slot], t) for n, t in generation.restored_state.items())
                )
            )
        return tuple(max(part, 0) for part in found), all(part >= 0 for part in found)

    def _by_page(self, generation: Generation, layer: int, name: str) -> torch.Tensor:
        """Return the restored KV of one tensor, `[pages, page_size, heads, head_dim]`, from the live cache, which kept it unchanged."""
        held = self._runner.layout.tensor_of(generation.cache, layer, name)[0, :, : generation.restored]
        return held.permute(1, 0, 2).reshape(-1, self._runner.page_size, held.shape[0], held.shape[2])


def _first_equal(slots: Sequence[int], equal: Any) -> int:
    """Return the index of the first slot for which `equal` holds; -1 if there is none."""
    return next((part for part, slot in enumerate(slots) if equal(slot)), -1)
