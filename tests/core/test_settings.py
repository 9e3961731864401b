"""Kinds of settings, and the tables that sections of stores, tiers and plug-ins are read into."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiercache_backends.chain.settings import TierSettings
from tiercache_backends.grpc.settings import GrpcSettings
from tiercache_backends.mooncake.settings import MooncakeSettings
from tiercache_backends.s3.settings import S3Settings

from tiercache.errors import ConfigError
from tiercache.events.settings import EventSettings
from tiercache.integrations.settings import StoreSettings
from tiercache.settings import (
    FLAG,
    LINE,
    LIVE,
    PATH,
    Kind,
    Named,
    duration,
    matching,
    one_of,
    read_attributes,
    read_section,
    settings_in,
    size,
    whole,
)

TABLES = (TierSettings, GrpcSettings, S3Settings, MooncakeSettings, StoreSettings, EventSettings)
EVERY = [(table, name) for table in TABLES for name in settings_in(table)]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Table of a test."""

    place: Annotated[str, PATH, Named("path")]
    room: Annotated[int, size(4, or_zero=True), LIVE] = 8
    is_open: Annotated[bool, FLAG] = False
    found: int = 0


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (size(), "1.5KiB", 1536), (size(multiple=4096), "5000", 4096), (size(4, or_zero=True), 0, 0),
        (size(), "500mb", 500_000_000), (size(), "7", 7), (size(), 7, 7), (size(), "3B", 3),
        (duration(), "1.5h", 5400.0), (duration(), 0.5, 0.5), (duration(0.0), "10us", 10 * 1e-6),
        (duration(), "250ms", 0.25), (duration(0.0), 0, 0.0), (whole(1, 64), "7", 7), (whole(1, 64), 64, 64),
        (FLAG, "Yes", True), (FLAG, "0", False), (FLAG, True, True), (one_of("a", "b"), "B", "b"),
        (matching("[a-z]+", "is no word"), "abc", "abc"), (LINE, "", ""), (PATH, "/a\udcff", "/a\udcff"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_a_user_writes_it(kind: Kind, given: Any, value: Any) -> None:
    assert kind.parse(given) == value
    assert kind.parse(kind.text(value) if kind.text else value) == value


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (size(4096), "1KiB", "'1KiB' is not possible; use 4KiB to 1024PiB"),
        (size(4096, 8192, or_zero=True), 1, "1 is not possible; use 4KiB to 8KiB, or 0"),
        (size(), "much", "'much' is not a size"),
        (duration(), "0s", "'0s' is not possible; use more than 0 and at most 8784h"),
        (duration(0.01, 3600), 0, "0 is not possible; use 10ms to 1h"),
        (duration(), "soon", "'soon' is not a duration"),
        (whole(1, 64, "threads"), "0", "'0' is not possible; use a whole number of threads from 1 to 64"),
        (whole(1, 64), True, "True is not possible; use a whole number from 1 to 64"),
        (whole(1, 64), "1" * 99, "is not possible"),
        (FLAG, "maybe", "'maybe' is neither true nor false"),
        (one_of("a", "b", "c"), "d", "'d' is not possible; use a, b or c"),
        (matching("[a-z]+", "is no word"), "A", "'A' is no word"),
        (LINE, "a\nb", r"'a\nb' is not a line of text"),
        (PATH, "secret", "this is not an absolute path"),
    ],
)
def test_what_is_not_possible_gets_one_sentence(kind: Kind, given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind.parse(given)
    assert sentence in str(refused.value)
    assert given != "secret" or "secret" not in str(refused.value)


def test_a_section_is_read_into_a_table() -> None:
    made = read_section(Table, "the store", {"path": "/a", "room": "4KiB", "is_open": "yes"})
    assert made == Table(place="/a", room=4096, is_open=True)
    assert [name for name, one in settings_in(Table).items() if one.is_live] == ["room"]
    for section, sentence in (
        ({}, "the store needs 'path', as in x:///a"),
        ({"path": "/a", "found": 1}, "the store has no setting 'found'; it has is_open, path, room"),
        ({"path": "/a", "room": 3}, "the store, setting 'room': 3 is not possible"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read_section(Table, "the store", section, "x:///a")


@pytest.mark.parametrize(("table", "name"), EVERY)
def test_every_default_is_written_so_that_it_reads_the_same(table: type, name: str) -> None:
    setting = settings_in(table)[name]
    [field] = [one for one in dataclasses.fields(table) if one.name == setting.attribute]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default not in (dataclasses.MISSING, None, "") and not isinstance(
        default, dict
    ):  # none writes policies
        assert setting.kind.parse(setting.kind.text(default) if setting.kind.text else default) == default


values = st.text(max_size=8) | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.text())


@given(st.sampled_from(EVERY), values)
def test_any_value_of_a_setting_is_read_or_refused_in_one_sentence(place, value):
    table, name = place
    said = f"it, setting {name!r}: "
    try:
        assert read_attributes(table, "it", {name: value}).keys() == {settings_in(table)[name].attribute}
    except ConfigError as error:
        said = str(error)
    assert said.isprintable()
    assert said.startswith(f"it, setting {name!r}: ")
