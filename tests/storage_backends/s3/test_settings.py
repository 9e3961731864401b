"""Settings of the `s3` store: what is wrong is said in one sentence, and secrets are not settings."""

from __future__ import annotations

import pytest
from tiercache_backends.s3.settings import read_settings

from tiercache.config.urls import section_of
from tiercache.errors import ConfigError


def settings(url: str) -> object:
    section = section_of(url)
    assert section.pop("type") == "s3"
    return read_settings(section)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


def test_a_url_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_settings(
        {"address": "bucket", "path": "/a/b/", "endpoint": "https://s3.example:9000/", "pack": "8MiB"}
    )
    assert str(found) == "s3://bucket/a/b"
    assert found.place("packs/x") == "a/b/packs/x"
    assert (found.endpoint, found.region, found.pack) == ("https://s3.example:9000", "us-east-1", 8 << 20)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert read_settings({"address": "bucket"}).endpoint == "http://127.0.0.1:9000"
    assert read_settings({"address": "bucket"}).region == "eu-west-1"
    assert read_settings({"address": "bucket"}).place("x") == "x"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://", "needs 'address', as in s3://bucket"),
        ("s3:///only/a/path", "needs 'address', as in s3://bucket"), ("s3://ab", "3 to 63"),
        ("s3://Bucket", "no bucket"), ("s3://bucket/a//b", "no prefix"), ("s3://bucket/a/../b", "no prefix"),
        ("s3://bucket?endpoint=storage.example:9000", "https://storage.example:9000"),
        ("s3://bucket?endpoint=https://user:password@host", "no endpoint"),
        ("s3://bucket?endpoint=http://storage.example:9000", "allow_http=true"),
        ("s3://bucket?endpoint=http://localhost.example", "allow_http=true"),
        ("s3://bucket?region=Here", "us-east-1"),
        ("s3://bucket?secret_access_key=hidden", "credentials_file"),
        ("s3://bucket?access_key_id=hidden", "credentials_file"),
        ("s3://bucket?pack=64MiB&in_flight=32MiB", "in_flight"), ("s3://bucket?size=1", "no setting"),
        ("s3://bucket?credentials_file=/nowhere/at/all", "credentials_file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(url: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(url)
    assert advice in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert "password" not in str(caught.value)


def test_a_service_of_ones_own_needs_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert settings("s3://bucket")
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        settings("s3://bucket?endpoint=https://host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:9000"])
def test_this_machine_needs_no_tls(host: str) -> None:
    assert settings(f"s3://bucket?endpoint=http://{host}")
