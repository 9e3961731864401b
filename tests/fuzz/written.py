"""Targets whose bytes a user wrote: settings, addresses, prompts, traces, descriptions of models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tiercache_backends.chain.settings import parse_tiers
from tiercache_backends.grpc.settings import read_settings as grpc_settings
from tiercache_backends.mooncake.settings import read_settings as mooncake_settings
from tiercache_backends.s3.settings import parse_settings as s3_settings

from tests.fuzz.base import MIB, Target, file_of, promised
from tiercache.cli.store.prompt import tokens_of
from tiercache.config.loading import load
from tiercache.config.urls import parse_address, section_of, storage_url
from tiercache.errors import ConfigError, InputError
from tiercache.integrations.settings import StoreSettings
from tiercache.models.profile import CONFIGS, profile_named
from tiercache.settings import read_section
from tiercache.text import exact_duration, exact_size, parse_duration, parse_size
from tiercache_lab.prove.run import load as load_saved
from tiercache_lab.replay.sources.mooncake import read_trace
from tiercache_lab.replay.sources.sessions import read_sessions

SETTINGS: dict[str, Callable[[dict[str, object]], object]] = {
    "grpc": grpc_settings, "s3": s3_settings, "mooncake": mooncake_settings,
}  # fmt: skip


def _url(found: bytes) -> None:
    """Read a storage URL, and write it again; and read the settings in it where it names such a store."""
    section = section_of(found.decode("utf-8", "surrogateescape"))
    rest = {name: value for name, value in section.items() if name not in ("type", "path", "address")}
    if section.get("path", "/").startswith("/") and section["type"] in SETTINGS and rest:
        where = {"path": section.get("path", ""), "address": section.get("address", "")}
        made = storage_url(section["type"], **where, **rest)
        promised(section_of(made)["type"] == section["type"], "a URL of another type")
    [tier] = parse_tiers([section])
    own = {name: value for name, value in tier.section.items() if name != "type"}
    SETTINGS.get(section["type"], dict)(own)


def _urls() -> Sequence[bytes]:
    return [
        b"file:///var/lib/tiercache?capacity=200GiB&tier_name=ssd&tier_write=write_back&tier_promote=always",
        b"grpc://node7:7070?tls=true&timeout=2s", b"grpc:///run/x%20y?timeout=2s",
        b"s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=eu&deadline=2s&pack=1MiB",
        b"mooncake://127.0.0.1:50051?segment=1GiB&replicas=2&state_replicas=3&protocol=tcp", b"memory://",
    ]  # fmt: skip


def _toml(found: bytes) -> None:
    load(file_of(found, ".toml"))


def _tomls() -> Sequence[bytes]:
    return [
        b'directory = "/d"\ndisk_bytes = "64GiB"\nhost_bytes = "1GiB"\nlisten = ["127.0.0.1:0"]\ndrain = 3\n'
        b'[http]\nlisten = "127.0.0.1:0"\n[limits]\nidle = "5s"\n[log]\nformat = "json"\n[audit]\nkept = 2\n',
        b'storage = ["memory://?capacity=1GiB", "file:///d?capacity=64GiB"]\n[tls]\ncertificate = "/a"\n'
        b'key = "/b"\n[[principals]]\nname = "a"\nuid = 3\nverbs = ["read"]\ntenant = "t"\n[tenants.t]\n'
        b'salt_file = "/s"\n[events]\nendpoint = "tcp://127.0.0.1:5557"\n',
    ]


def _text(found: bytes) -> None:
    """Read sizes, durations and addresses, and write them again."""
    text = found.decode("utf-8", "replace")
    kind, _, value = text.partition(" ")
    if kind == "size":
        promised(parse_size(exact_size(parse_size(value))) == parse_size(value), "another size")
    elif kind == "duration":
        exact_duration(parse_duration(value))
    else:
        promised(0 <= parse_address(value).port < 1 << 16, "a port that is none")


def _texts() -> Sequence[bytes]:
    return [b"size 64GiB", b"size 1.5 TB", b"duration 250ms", b"duration 1.5h", b"address [::1]:7070",
            b"address node-7.example:80", b"address 127.0.0.1:0"]  # fmt: skip


def _engine(found: bytes) -> None:
    """Read the settings that an engine hands to a plug-in, which are any JSON."""
    try:
        given = json.loads(found)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        read_section(StoreSettings, "extra_config", given)


def _trace(found: bytes) -> None:
    trace = read_trace(file_of(found, ".jsonl"))
    promised(len(trace.ids) == trace.offsets[-1], "ids of no request")
    for request, _ in zip(trace.generate(0), range(2), strict=False):
        promised(len(request.prompt) <= 1 << 22, "a prompt that is too long")


def _traces() -> Sequence[bytes]:
    rows = [{"timestamp": t, "input_length": 600, "output_length": 5, "hash_ids": [1, t]} for t in (0, 7)]
    return ["\n".join(map(json.dumps, rows)).encode(), gzip.compress(b"x")]


def _sessions(found: bytes) -> None:
    for session in read_sessions(file_of(found, ".json")):
        promised(session.seconds >= 0 and session.agents, "a session of nothing")


def _session_seeds() -> Sequence[bytes]:
    turn = {"t": 1.5, "type": "s", "in": 130, "out": 3, "hash_ids": [1, 2, 3]}
    inner = {"t": 2, "type": "subagent", "subagent_type": "x", "requests": [turn]}
    made = {"block_size": 64, "hash_id_scope": "local", "tool_tokens": 64, "requests": [turn, inner]}
    return [json.dumps(made).encode()]


def _model(found: bytes) -> None:
    profile = profile_named(str(file_of(found, ".config.json")))
    promised(profile.kv_bytes_per_token >= 0, "a cost below nothing")


def _prompt(found: bytes) -> None:
    tokens = tokens_of(str(file_of(found, ".tokens")), None, "", "")
    promised(tokens.dtype == np.uint64 and tokens.ndim == 1, "tokens of another type")


def _prompts() -> Sequence[bytes]:
    return [b"[1, 2, 3]", b"1 2, 3\n4", b""]


def _saved(found: bytes) -> None:
    load_saved(file_of(found, ".saved"))


def _saved_seeds() -> Sequence[bytes]:
    first = {"text": "a", "first_token_s": 0.5, "prompt_tokens": 9, "cached_tokens": 0, "sources": None}
    made = {"format": 1, "url": "http://a", "model": "m", "engine": "e", "prompt": "p", "seed": 1,
            "tokens": 4000, "max_tokens": 8, "first": first}  # fmt: skip
    return [json.dumps(made).encode()]


JSONS = {name: json.dumps(config).encode() for name, config in CONFIGS.items()}
ENGINE = {"storage": ["file:///d?capacity=1GiB"], "revision": "r", "quantization": "fp8", "tenant": "t"}

READ_AT_ONCE = 64 * MIB
"""Room that Python makes, but does not touch, to read a file of at most so many bytes."""

WRITTEN = (
    Target("storage URL", _url, _urls, (ConfigError,), max_bytes=1024, costs=2),
    Target("configuration", _toml, _tomls, (ConfigError,), max_bytes=2048, costs=20),
    Target("size or address", _text, _texts, (ConfigError,), max_bytes=256),
    Target("engine's settings", _engine, partial(list, [json.dumps(ENGINE).encode()]), (ConfigError,)),
    Target("trace", _trace, _traces, (InputError,), costs=3),
    Target("sessions", _sessions, _session_seeds, (InputError,), max_memory=READ_AT_ONCE + 16 * MIB, costs=3),
    Target("model config", _model, lambda: [*JSONS.values()], (ConfigError,), costs=3),
    Target("prompt", _prompt, _prompts, (ConfigError,), max_memory=4 * READ_AT_ONCE + 16 * MIB, costs=2),
    Target("saved answer", _saved, _saved_seeds, (ConfigError,), costs=2),
)
