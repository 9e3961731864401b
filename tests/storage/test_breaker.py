"""The breaker beside a plain model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import example_count
from tiercache.storage.guard import MAX_PAUSE, Breaker

PAUSE = 1.0
FAILURES = 3


class BreakerMachine(RuleBasedStateMachine):
    """Random calls of a breaker, compared with a model.

    The model knows the number of failures in a row, since when the breaker is open and for how long at
    most, and whether a probe is under way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.luck = 0.0
        self.breaker = Breaker(FAILURES, PAUSE, clock=lambda: self.now, random=lambda: self.luck)
        self.row = 0
        self.open_since: float | None = None
        self.pause = PAUSE
        self.least = PAUSE
        self.probing = False
        self.closed_at = -1000.0

    def opens(self, pause: float) -> None:
        self.open_since, self.pause, self.least = self.now, pause, pause * (1 - 0.25 * self.luck)

    def opens_anew(self) -> None:
        again = self.now - self.closed_at < self.pause
        self.opens(min(MAX_PAUSE, 2 * self.pause) if again else PAUSE)

    @rule(luck=st.floats(0, 0.999))
    def luck_changes(self, luck: float) -> None:
        self.luck = luck

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.74, 1.0, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_call_asks(self) -> None:
        is_over = self.open_since is not None and self.now >= self.open_since + self.least
        assert self.breaker.is_probe_due() == (is_over and not self.probing)
        self.probing |= is_over

    @rule()
    def a_call_succeeds(self) -> None:
        self.breaker.succeeded()
        self.row = 0

    @rule()
    def a_call_fails(self) -> None:
        self.breaker.failed()
        if self.open_since is None:
            self.row += 1
            if self.row >= FAILURES:
                self.opens_anew()

    @rule()
    def it_is_tripped(self) -> None:
        self.breaker.trip()
        if self.open_since is None:
            self.opens_anew()

    @precondition(lambda self: self.probing)
    @rule(well=st.booleans())
    def the_probe_tells(self, well: bool) -> None:
        self.breaker.probed(well)
        self.probing = False
        if well:
            self.open_since, self.row, self.closed_at = None, 0, self.now
        else:
            self.opens(min(MAX_PAUSE, 2 * self.pause))

    @precondition(lambda self: not self.probing)
    @rule(well=st.booleans())
    def somebody_tells_of_a_probe_that_was_not(self, well: bool) -> None:
        self.breaker.probed(well)

    @invariant()
    def it_is_closed_when_the_model_is(self) -> None:
        assert self.breaker.closed == (self.open_since is None)
        assert self.least <= self.pause <= MAX_PAUSE


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(deadline=None, max_examples=example_count(60), stateful_step_count=40)


def test_of_many_at_once_one_probes() -> None:
    now = 0.0
    breaker = Breaker(1, PAUSE, clock=lambda: now, random=lambda: 0.0)
    breaker.failed()
    now = 2.0
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: breaker.is_probe_due(), range(200))) == 1
    assert not breaker.closed
