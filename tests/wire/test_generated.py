"""The generated modules are those of the .proto files, and both files keep to the rules of the wire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.wire.methods import METHODS, SERVICE
from tiercache.wire.v1 import attach_pb2, storage_pb2

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto/generate.py", tmp_path], check=True)
    made = tmp_path / "tiercache/wire/v1"
    kept = ROOT / "tiercache/wire/v1"
    assert sorted(p.name for p in made.iterdir()) == sorted(
        p.name for p in kept.iterdir() if "_pb2" in p.name
    )
    for path in made.iterdir():
        assert path.read_bytes() == (kept / path.name).read_bytes(), f"{path.name} is stale; run: make proto"


def test_the_table_of_methods_is_the_service_of_the_proto() -> None:
    service = storage_pb2.DESCRIPTOR.services_by_name["Storage"]
    assert service.full_name == SERVICE
    assert {m.name for m in service.methods} == set(METHODS)
    for described in service.methods:
        method = METHODS[described.name]
        assert (described.input_type, described.output_type) == (
            method.request.DESCRIPTOR,
            method.reply.DESCRIPTOR,
        )
        assert (described.client_streaming, described.server_streaming) == (
            method.streams == "request",
            method.streams == "reply",
        )


@pytest.mark.parametrize("module", [storage_pb2, attach_pb2], ids=["storage", "attach"])
def test_unknown_fields_survive(module: object) -> None:
    newer = b"\xfa\x3f\x03abc"  # field 1023 of type bytes
    for descriptor in module.DESCRIPTOR.message_types_by_name.values():  # type: ignore[attr-defined]
        message = getattr(module, descriptor.name)()
        message.MergeFromString(newer)
        assert message.SerializeToString().endswith(newer)
