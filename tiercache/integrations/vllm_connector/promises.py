"""Promises of an engine's scheduler to its requests, by the caches of the engine's workers.

    scheduler                                  worker of each rank
    find: Ask                --- step n --->   EngineCache.ask
                             <-- results ---   EngineCache.answers, once storage has answered
    find: the depth that all have
    claim: BlockLoad         --- step m --->   EngineCache.load
                             <-- results ---   EngineCache.ended

A depth counts if all ranks have promised it. Where their answers differ, they are asked again for no more
than the least of them. Ranks need not be alike: each evicts and weighs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from tiercache.core import TokenArray
from tiercache.integrations.vllm_connector.cache import Ask, BlockLoad, Blocks, EngineCache

Call: TypeAlias = Callable[[EngineCache], object]
"""Call of each worker's cache, which has to be pickled for workers elsewhere."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Question about a request, and the answers so far."""

    ask: Ask
    depths: list[int] = field(default_factory=list)


class Promises:
    """Promises of one engine, whose scheduler asks the caches of its workers.

    Thread safety: the scheduler's thread.
    """

    def __init__(self, page_size: int, ranks: int, here: EngineCache | None) -> None:
        """`here`: cache of the only worker if that is in this process, which is called at once."""
        self._page_size, self._ranks, self._here = page_size, ranks, here
        self._asked: dict[str, _Asked] = {}
        self._loads: dict[str, BlockLoad] = {}
        """Loads that have not ended on all ranks."""
        self._calls: list[Call] = []
        self._count = 0

    def tell(self, call: Call) -> None:
        """Call the cache of each worker: at once, or with the next step."""
        if self._here is not None:
            call(self._here)
        else:
            self._calls.append(call)

    def take_calls(self) -> list[Call]:
        """Return the calls that go to the workers with this step."""
        calls, self._calls = self._calls, []
        return calls

    def find(self, request: str, tokens: TokenArray, extra: bytes, begin: int) -> int | None:
        """Return how many pages a request can have, of which the engine has `begin`; None: ask again.

        The promise holds until `claim`, `decline` or `forget`, or the next answer.
        """
        asked = self._asked.get(request)
        if (
            self._here is not None
            or asked is None
            or (asked.ask.begin, len(asked.ask.tokens)) != (begin, len(tokens))
        ):
            limit = max(begin, (len(tokens) - 1) // self._page_size)
            asked = self._ask(request, tokens, extra, begin, limit)
        if len(asked.depths) < self._ranks:
            return None
        least = min(asked.depths)
        if begin < least < max(asked.depths):
            self._ask(request, tokens, extra, begin, least)
            return None
        if least > begin and any(self._is_on_its_way(asked.ask, load) for load in self._loads.values()):
            return None  # the engine has the common pages itself as soon as that load has ended
        return least

    def _ask(self, request: str, tokens: TokenArray, extra: bytes, begin: int, limit: int) -> _Asked:
        self._count += 1
        ask = Ask(self._count, request, tokens, extra, begin, limit)
        asked = self._asked[request] = _Asked(ask)
        if self._here is None:
            self.tell(partial(EngineCache.ask, ask=ask))
        elif (depth := self._here.find(ask)) is not None:
            asked.depths.append(depth)
        return asked

    def _is_on_its_way(self, ask: Ask, load: BlockLoad) -> bool:
        """Return whether a load brings pages of a prompt that the engine lacks."""
        if load.extra != ask.extra:
            return False
        count = min(load.depth * self._page_size, len(ask.tokens))
        apart = np.flatnonzero(load.tokens[:count] != ask.tokens[:count])
        shared = (int(apart[0]) if len(apart) else count) // self._page_size
        return shared > min(ask.begin, load.begin)

    def note_answers(self, answers: Iterable[tuple[str, int, int]]) -> None:
        """Note what the workers have answered; an answer to an older question does not count."""
        for request, number, depth in answers:
            asked = self._asked.get(request)
            if asked is not None and asked.ask.number == number:
                asked.depths.append(depth)

    def claim(self, request: str, pages: int, tables: Blocks) -> BlockLoad:
        """Return the load of `pages` pages of a promise, behind those that the engine has.

        It fails if nothing was promised, or if `tables` lacks blocks.
        """
        asked = self._asked.pop(request, None)
        if asked is None:
            load = BlockLoad(request, np.empty(0, np.uint64), b"", 0, 0, {})
        else:
            begin = asked.ask.begin
            load = BlockLoad(request, asked.ask.tokens, asked.ask.extra, begin, begin + pages, tables)
        self._loads[request] = load
        return load

    def decline(self, request: str) -> None:
        """End the promise to a request, which computes all that the engine does not have itself."""
        self._asked.pop(request, None)
        self.tell(partial(EngineCache.decline, request=request))

    def forget(self, request: str, *, is_told: bool = False) -> None:
        """End everything for a request that is over, but a load, which goes on to its end.

        `is_told`: a last save tells the workers.
        """
        self._asked.pop(request, None)
        if not is_told:
            self.tell(partial(EngineCache.forget, request=request))

    def reset(self) -> bool:
        """Empty the host of each worker; return whether nothing is known to be left."""
        if self._here is not None:
            return self._here.reset()
        self.tell(EngineCache.reset)
        return True

    def note_ended(self, requests: Iterable[str]) -> None:
        """Note loads that have ended on all ranks."""
        for request in requests:
            self._loads.pop(request, None)
