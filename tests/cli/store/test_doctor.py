"""`doctor`: a check for everything, one line each, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cli.store.test_samples import call
from tiercache import memory
from tiercache.cli.store import doctor
from tiercache.cli.store.doctor import MACHINE, Level

NAMES = {
    "packages", "kernel", "memfd", "memlock", "open files", "memory", "huge pages",
    "NUMA", "GPU",
    "engines", "file system", "disk space", "O_DIRECT", "page cache",
}  # fmt: skip


def test_every_check_has_a_line_and_leaves_nothing_behind(tmp_path):
    done = call("doctor", "-s", tmp_path, "-o", "json", ok=None)
    found = {check["name"]: check for check in done.document}
    assert found.keys() == NAMES
    assert all(check["level"] in ("ok", "warn", "fail") and check["found"] for check in found.values())
    assert all(bool(check["fix"]) == (check["level"] != "ok") for check in found.values())
    assert all("\n" not in check["fix"] + check["found"] for check in found.values())
    assert done.code == int(any(check["level"] == "fail" for check in found.values()))
    assert list(tmp_path.iterdir()) == []
    assert found["memfd"]["level"] == "ok"
    assert "/dev/shm is not needed" in found["memfd"]["found"]
    table = call("doctor", "-s", tmp_path, ok=None).out
    assert all(name in table for name in NAMES)
    assert len(call("doctor", "-s", tmp_path, "-o", "jsonl", ok=None).lines) == len(done.document)


def test_o_direct_works_where_the_kernel_has_it(tmp_path):
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
    (tmp_path / "probe").unlink()
    found = {row["name"]: row for row in call("doctor", "-s", tmp_path, "-o", "json", ok=None).document}
    assert (found["O_DIRECT"]["level"], found["O_DIRECT"]["found"]) == ("ok", "works")


def test_o_direct_is_refused_where_the_file_system_has_none(tmp_path):
    """On ramfs, which has no O_DIRECT, mounted where no other process sees it."""
    script = 'mount -t ramfs none "$0" && exec "$@"'
    alone = [shutil.which("unshare") or "true", "--mount", "sh", "-c", script, tmp_path]
    if subprocess.run([*alone, "true"], capture_output=True).returncode or not shutil.which("unshare"):
        pytest.skip("only root with util-linux can mount a file system of its own")
    said = [sys.executable, "-m", "tiercache.cli", "doctor", "-s", tmp_path, "-o", "json"]
    done = subprocess.run([*alone, *said], capture_output=True, text=True)
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert found["O_DIRECT"]["level"] == "warn"
    assert found["O_DIRECT"]["found"] == "refused: Invalid argument"
    assert "put the store on ext4 or xfs" in found["O_DIRECT"]["fix"]


def test_with_a_daemon_named_the_default_directory_is_checked(tmp_path, monkeypatch):
    """The disk of a daemon may be that of another machine, and its sockets have none."""
    monkeypatch.setattr(doctor, "DEFAULT_DIRECTORY", str(tmp_path))
    for store in ("grpc://host:1", f"grpc://{tmp_path}/run"):
        found = {row["name"]: row for row in call("doctor", "-s", store, "-o", "json", ok=None).document}
        assert found["file system"]["found"].endswith(f" at {tmp_path}")


def test_a_failure_is_exit_code_6(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "file_system_of", lambda directory: "nfs4")
    done = call("doctor", "-s", tmp_path, "-o", "json", ok=6)
    [found] = [check for check in done.document if check["level"] == "fail"]
    assert (found["name"], found["fix"][:16]) == ("file system", "use a local disk")


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("6.18.1-x", Level.OK), ("6.4.0", Level.WARN), ("5.0.21", Level.FAIL), ("4.18.0-553.el8", Level.FAIL),
        ("odd", Level.FAIL),
    ],
)  # fmt: skip
def test_kernels_are_told_apart(release, level, monkeypatch):
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    [kernel] = [check for check in MACHINE.findings() if check.name == "kernel"]
    assert kernel.level is level


def test_a_machine_that_tells_nothing_gets_answers_all_the_same(monkeypatch, tmp_path):
    for module in (doctor, memory):
        monkeypatch.setattr(module, "kernel_text", lambda path: "")
    monkeypatch.setattr(doctor, "installed", lambda package: "")
    found = {check.name: check for check in MACHINE.findings()}
    assert found["packages"].level is Level.FAIL
    assert found["engines"].found.startswith("none installed")
    assert found["memory"].found == "0 B available of 0 B"
    assert doctor.file_system_of(tmp_path) == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 24 02:44:27 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@build)",
    ],
)
def test_a_gpu_is_named_with_its_driver_and_cupy(line, monkeypatch):
    monkeypatch.setattr(doctor, "kernel_text", lambda path: line if path.parts[-2] == "nvidia" else "")
    monkeypatch.setattr(doctor, "installed", lambda package: "13.6.0" if package == "cupy-cuda13x" else "")
    [gpu] = [check for check in MACHINE.findings() if check.name == "GPU"]
    assert gpu.level is Level.OK
    assert "driver 570.86.15" in gpu.found
    assert "cupy-cuda13x 13.6.0" in gpu.found


def test_doctor_loads_no_engine(tmp_path):
    import subprocess
    import sys

    code = (
        f"import sys; sys.argv = ['tiercache', 'doctor', '-s', {str(tmp_path)!r}]\n"
        "from tiercache.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'cupy', 'vllm', 'sglang', 'transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        == "[]"
    )
