"""Every decoder of bytes from outside: a documented error or a value, within bounds of memory and time."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.fuzz.base import MIB, BrokenPromiseError, Target
from tests.fuzz.mutation import mutations
from tests.fuzz.table import TARGETS

INPUTS = 400
"""Mutated inputs of a target whose inputs take a tenth of a millisecond."""


@pytest.fixture(autouse=True, scope="module")
def traced() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # decoders warn of what they refuse
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_like_sound_ones_give_a_value_or_a_documented_error(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    assert any(target.attempt(seed) for seed in seeds), "no sound input is accepted"
    for data in (b"", *seeds, *mutations(seeds, max(10, INPUTS // target.costs), target.max_bytes)):
        target.measured(data)


FOUND = {
    "not UTF-8": ("storage URL", b"grpc:///run/x\xa520y?timeout=2s"),
    "deep format": ("store format", b"[" * 4096),
    "nested cursor": ("scan cursor", b"\xdc\x0f\x00" * 1300),
    "nested namespace": ("namespace record", b"\xdc\x0f\x00" * 1300),
    "nested pooled namespace": ("pooled namespace", bytes(16) + b"\xdc\x0f\x00" * 1300),
}
"""Inputs that once led to another error, or to much memory."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once_stays_repaired(what: str) -> None:
    name, data = FOUND[what]
    TARGETS[name].measured(data)


def test_a_decoder_that_breaks_its_promise_is_noticed() -> None:
    def decode(data: bytes) -> None:
        if data == b"held":
            bytearray(64 * MIB)
        elif data:
            raise KeyError(data)

    target = Target("broken", decode, list, (ValueError,))
    assert target.measured(b"")
    with pytest.raises(BrokenPromiseError, match=r"4 bytes took 64\.0 MiB"):
        target.measured(b"held")
    with pytest.raises(KeyError):
        target.measured(b"other")


def test_mutations_are_the_same_in_each_run_and_stay_within_the_limit() -> None:
    first, again = (list(mutations([b"seed", b"other seed"], 200, 64)) for _ in range(2))
    assert first == again
    assert len(set(first)) > 100
    assert max(map(len, first)) <= 64
