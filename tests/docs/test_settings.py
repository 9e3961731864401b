"""Pages of stores and tiers: each setting has a row in the table of its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiercache_backends.chain.settings import TierSettings
from tiercache_backends.grpc.settings import GrpcSettings
from tiercache_backends.mooncake.settings import MooncakeSettings
from tiercache_backends.s3.settings import S3Settings

from tiercache.settings import settings_in
from tiercache.storage.tiers import PREFIX

DOCS = Path(__file__).parents[2] / "docs"
OF_A_URL = {"address", "path"}
"""Settings that are the beginning of a URL, and not in a table."""


@pytest.mark.parametrize(
    ("table", "page", "prefix"),
    [
        (TierSettings, "tiers.md", PREFIX),
        (GrpcSettings, "stores.md", ""),
        (S3Settings, "stores.md", ""),
        (MooncakeSettings, "stores.md", ""),
    ],
)
def test_every_setting_has_a_row(table: type, page: str, prefix: str) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (DOCS / page).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {prefix + name for name in settings_in(table)} - named - OF_A_URL == set()
