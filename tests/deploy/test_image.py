"""The image: built by buildah on a root of Debian, and a daemon that serves in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.base import DEPLOY, run, tool

ROOT = DEPLOY.parent
BASE, IMAGE = "localhost/python-base", "localhost/tiercache"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
SECONDS = 1200
# A namespace of mounts of its own: the image's root, read-only, with what compose mounts into it.
CONFINED = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
for directory in var/lib/tiercache run/tiercache tmp; do
  mount -t tmpfs -o mode=0700,uid=65532,gid=65532 tmpfs "$1/$directory"
done
mount -t proc proc "$1/proc"
mount --bind /dev "$1/dev"
root=$1; shift
exec chroot "$root" setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set=-all \
  env -i "$@"
"""
SESSION = """
id -u
touch /opt/x 2>&1 || true
%(command)s --disk-bytes 64MiB --host-bytes 64MiB &
for second in $(seq 120); do %(health)s > /tmp/ping 2>&1 && break; sleep 1; done
cat /tmp/ping
kill -TERM $!
wait $! && echo ended well
"""


class Built(NamedTuple):
    """An image, and where its root is mounted."""

    root: Path
    config: dict[str, object]


def long(*command: str | Path) -> str:
    """Output of a command that may take minutes and must succeed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    buildah, debootstrap = (tool(name, f"apt-get install {name}") for name in ("buildah", "debootstrap"))
    tool("unshare", "apt-get install util-linux")
    if os.getuid() != 0:
        pytest.skip("only root can make a root file system")
    # In the working directory: the directory for temporary files may be memory, and this takes a gigabyte.
    with tempfile.TemporaryDirectory(prefix=".campaign-image-", dir=Path.cwd()) as made:
        here = Path(made)
        at = (buildah, "--root", here / "storage", "--runroot", here / "run", "--storage-driver", "vfs")
        long(debootstrap, "--variant=minbase", f"--include={PACKAGES}", "bookworm", here / "debian")
        base = long(*at, "from", "scratch")
        long(*at, "add", "--quiet", base, here / "debian", "/")
        long(*at, "commit", "--quiet", base, BASE)
        for path in ("constraints-dev.txt", "deploy/container/requirements.txt", ".containerignore"):
            (here / "context" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, here / "context" / path)
        long(sys.executable, "-m", "build", "--wheel", "--outdir", here / "context/dist", ROOT)
        version = (here / "debian/usr/bin/python3").resolve().name.removeprefix("python")
        # Fetched here, as a registry may need settings of this machine; the image checks the hashes again.
        long(sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--only-binary", ":all:",
             "--python-version", version, "--dest", here / "wheels",
             "-r", ROOT / "deploy/container/requirements.txt")  # fmt: skip
        (here / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        long(*at, "build", "--isolation", "chroot", "--format", "docker", "--build-arg", f"PYTHON={BASE}",
             "-v", f"{here}/wheels:/wheels:ro", "-v", f"{here}/pip.conf:/etc/pip.conf:ro", "--tag", IMAGE,
             "-f", DEPLOY / "container/Containerfile", here / "context")  # fmt: skip
        container = long(*at, "from", IMAGE)
        config = json.loads(long(*at, "inspect", "--type", "image", IMAGE))["Docker"]["config"]
        yield Built(Path(long(*at, "mount", container)), config)
        run(*at, "umount", container)


@pytest.mark.stress
@pytest.mark.timeout(2 * SECONDS)
def test_a_daemon_serves_in_the_image(built: Built) -> None:
    """The daemon runs as the image's user on a read-only root, and the image's health check asks it."""
    config = built.config
    assert config["User"] == "65532:65532"
    command = " ".join([*config["Entrypoint"], *config["Cmd"]])
    _, *health = config["Healthcheck"]["Test"]
    session = SESSION % {"command": command, "health": " ".join(health)}
    said = run("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONFINED, "sh",
               built.root, *config["Env"], "sh", "-c", session)  # fmt: skip
    user, touched, *rest = said.splitlines()
    assert user == "65532"
    assert "Read-only file system" in touched
    assert any(line.startswith("1 round trip") for line in rest), said
    assert rest[-1] == "ended well"


@pytest.mark.stress
@pytest.mark.timeout(2 * SECONDS)
def test_nothing_else_is_installed_than_what_is_pinned(built: Built) -> None:
    said = run("chroot", built.root, "/opt/tiercache/bin/python", "-m", "pip", "list", "--format", "json")
    found = {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(said)}
    pinned = re.findall(r"(?m)^\S+==\S+", (DEPLOY / "container/requirements.txt").read_text())
    wanted = dict(line.lower().replace("_", "-").split("==") for line in pinned)
    assert {name: found.get(name) for name in wanted} == wanted
    assert {*found} - {*wanted} <= {"tiercache-hybrid", "pip", "setuptools", "wheel"}
