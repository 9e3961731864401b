"""Checkpoints where later prompts are likely to leave a prompt, if that saves more than it costs."""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

from tiercache.index.checkpoints.base import CheckpointPlan, Checkpoints, PromptView
from tiercache.index.checkpoints.departures import Departures, Mark, Past, size_of
from tiercache.index.checkpoints.memory import PageMemory
from tiercache.index.checkpoints.placement import place_priced
from tiercache.index.node import Digests
from tiercache.policy import LEARN_EVERY, CheckpointKind
from tiercache.policy.costs import Costs

_CUT_TOKENS: Final = 84
"""Cost of a cut of the prefill, as a number of tokens to compute: 2 ms for Qwen3-Next at 250 TFLOP/s."""
_MOST: Final = 8
"""Number of states that one request may leave."""
_DECAY: Final = 0.95
"""Factor by which each `LEARN_EVERY` requests multiply earlier observations."""
_REFRESH: Final = 16
"""Number of requests after which rates are derived anew."""
_REMEMBERED: Final = 1 << 14
"""Number of requests that are remembered."""
_ANSWER: Final = 64
"""Number of pages in which the end of an earlier prompt is searched, before a place in its answer."""


class _Seen(NamedTuple):
    """A prompt, compared with what is remembered of earlier ones."""

    past: Past
    """The prompt itself, as it will be remembered."""
    owner: Past | None
    """Request that computed the last page that the prompt shares; None if it is not remembered."""


class Learned(Checkpoints):
    """Checkpoints that pay: the work that they are likely to save is worth more than a state and a cut.

    A later prompt *leaves* a request at some depth. Where, is learned for each class of requests, from every
    request that comes: whether at the end of the answer, at the end of the prompt, at the branch where the
    request had left an earlier one itself, or in between, and how far behind the branch or before the
    prompt's end (see `Departures`). It does not matter whether a state was there, so that nothing need be
    tried out, and a kind of checkpoint that was useless for long comes back when it is missed.

    The depths of a plan are then those at which the expected work, plus the cost of the states, is least (see
    `place_priced`). A state costs its bytes, at the price of lately evicted bytes: the FLOPs that requests
    missed because of evictions, divided by the bytes that were evicted. Each state but that at the end of the
    request also costs a cut. A cache that evicts nothing that is missed takes every state that pays its cut.

    Before anything is learned, the plans are about those of `CheckpointRules`. At most 8 states are taken
    for a request. Some 8 MiB are remembered: the last 2^18 pages at most, and the last 2^14 requests.

    Thread safety: as `Checkpoints`.
    """

    name: ClassVar[str] = "learned"

    def __init__(self, costs: Costs) -> None:
        self._profile = costs.profile
        self._cut = self._profile.flops(0, _CUT_TOKENS)
        self._memory = PageMemory()
        self._departures = Departures()
        self._pasts: list[Past | None] = [None] * _REMEMBERED
        """Remembered requests, by their number modulo the length."""
        self._requests = 0
        self._answer_pages = self._answers = 1.0
        """Whole pages of the answers that were continued, and number of such answers."""
        self._missed_flops = self._lost_bytes = 0.0
        self._compared: tuple[PromptView, _Seen] | None = None
        """Last prompt that was compared with what is remembered."""

    def plan(self, prefill: PromptView) -> CheckpointPlan:
        """Return the depths whose states are worth more than they cost."""
        past = self._compare(prefill).past
        price = self._price()
        weights = self._weights(prefill, past, price)
        end = past.full + max(1, round(self._answer_pages / self._answers))
        weights[end] = self._departures.rates(past)[Mark.END]
        points = sorted(weights)
        tokens = [point * prefill.page_size for point in points]
        flops = self._profile.flops(prefill.depth * prefill.page_size, tokens).tolist()
        shares = [weights[point] for point in points]
        prices = [price + self._cut] * (len(points) - 1) + [price]
        while len(chosen := place_priced(shares, flops, prices)) > _MOST:
            # If departures are spread evenly, the number of states falls with the square root of the price.
            dearer = 1.5 * (len(chosen) / _MOST) ** 2
            prices = [dearer * one for one in prices]
        depths = {points[i]: self._kind(prefill, past, points[i]) for i in chosen if points[i] < end}
        if past.last in depths and past.full > past.last:
            depths[past.full] = CheckpointKind.PROMPT  # no cut: the prefill ends there
        return CheckpointPlan(depths, len(points) - 1 in chosen)

    def most(self, tokens: int, page_size: int) -> int:
        """Return the fixed maximum, and one for a prompt that ends with a page."""
        return _MOST + 1

    def began(self, prefill: PromptView, missed: int) -> None:
        """Learn where the prompt left the request that had computed the pages before, and remember it."""
        past, owner = self._compare(prefill)
        if owner is not None:
            if past.branch > owner.full:
                self._answer_pages += past.branch - owner.full
                self._answers += 1.0
            self._departures.left(owner, past.branch)
        self._departures.began(past)
        if missed > prefill.depth:
            size = prefill.page_size
            self._missed_flops += self._profile.flops(prefill.depth * size, missed * size)
        self._pasts[self._requests % _REMEMBERED] = past
        self._memory.computed(prefill.digests()[prefill.depth :], self._requests)
        self._requests += 1
        self._compared = None
        if self._requests % _REFRESH == 0:
            self._departures.refresh()
        if self._requests % LEARN_EVERY == 0:
            self._decay()

    def lost(self, nbytes: float) -> None:
        """Count the bytes that evictions took."""
        self._lost_bytes += nbytes

    def _weights(self, prefill: PromptView, past: Past, price: float) -> dict[int, float]:
        """Return the expected number of later prompts that leave this one, by depth, without its answer."""
        start, last, size = prefill.depth, past.last, prefill.page_size
        if last <= start:
            return {}
        rates = self._departures.rates(past)
        weights = {last: rates[Mark.PROMPT]}
        if start < past.branch < last:
            weights[past.branch] = rates[Mark.BRANCH]
        between = rates[Mark.BETWEEN]
        if between * self._profile.flops(start * size, last * size) > self._cut + price:
            likely = self._departures.distances(past.mark)
            depths = [past.branch + way for way in likely.ahead] + [last - way for way in likely.back]
            for at, share in zip(depths, likely.shares, strict=True):
                if start < at < last:
                    weights[at] = weights.get(at, 0.0) + between * share
        return weights

    def _price(self) -> float:
        """Return what the bytes of a state are worth: the FLOPs that evictions of as many lately cost."""
        if not self._lost_bytes:
            return 0.0
        return self._profile.state_bytes * self._missed_flops / self._lost_bytes

    def _decay(self) -> None:
        self._departures.decay()
        self._answer_pages *= _DECAY
        self._answers *= _DECAY
        self._missed_flops *= _DECAY
        self._lost_bytes *= _DECAY

    def _compare(self, prefill: PromptView) -> _Seen:
        if self._compared is None or self._compared[0] is not prefill:
            digests = prefill.digests()
            known = prefill.ghost_depth
            overlap = min(known + self._memory.known(digests[known:]), prefill.last)
            owner = self._owner(digests, overlap)
            mark = Mark.FRESH if owner is None else owner.mark_of(overlap)
            size = size_of(prefill.prompt_tokens - overlap * prefill.page_size)
            quarter = prefill.prompt_tokens % prefill.page_size * 4 // prefill.page_size
            past = Past(overlap, prefill.last, prefill.full, mark, size, quarter)
            self._compared = prefill, _Seen(past, owner)
        return self._compared[1]

    def _owner(self, digests: Digests, overlap: int) -> Past | None:
        # Pages of answers are not remembered: if the overlap ends in an answer, its prompt ends before.
        for at in range(overlap - 1, max(-1, overlap - 1 - _ANSWER), -1):
            number = self._memory.owner(digests[at])
            if number is not None:
                recent = self._requests - number <= _REMEMBERED
                return self._pasts[number % _REMEMBERED] if recent else None
        return None

    @staticmethod
    def _kind(prefill: PromptView, past: Past, depth: int) -> CheckpointKind:
        if depth == past.last:
            return CheckpointKind.PROMPT
        if depth == past.branch:
            return CheckpointKind.BRANCH if depth <= prefill.path_depth else CheckpointKind.GHOST
        return CheckpointKind.PREDICTED
