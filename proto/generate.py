"""Generate the Python modules of the wire from the .proto files beside this script, below a directory.

    python proto/generate.py .

The check of the runtime's version is left out of them. It refuses a protobuf that is older than the compiler,
or newer by more than a major version, while these modules use nothing that differs between protobuf 4.25 and
7: CI runs the oldest and the newest that pyproject.toml allows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from grpc_tools import protoc

SOURCES = Path(__file__).parent
CHECK = re.compile(
    r"from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\([^)]*\)\n"
)


def generate(directory: Path) -> None:
    """Write the modules into `directory`, in the folders of their packages."""
    protos = sorted(SOURCES.rglob("*.proto"))
    outputs = [f"--python_out={directory}", f"--pyi_out={directory}"]
    if protoc.main(["protoc", f"-I{SOURCES}", *outputs, *map(str, protos)]):
        sys.exit("protoc failed; what it printed says why")
    for proto in protos:
        made = directory / proto.relative_to(SOURCES).with_name(f"{proto.stem}_pb2.py")
        text, removed = CHECK.subn("", made.read_text("utf-8"))
        if removed != 2:
            sys.exit(f"{made} has another version check than this script knows; adapt CHECK")
        made.write_text(text, "utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
