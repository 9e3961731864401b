"""`doctor`: a check for everything, one line each, and nothing left behind."""

from __future__ import annotations

import pytest

from tests.cli.test_store_samples import call
from tiercache.cli.store import checks, storage_checks
from tiercache.cli.store.checks import Level

NAMES = {
    "python", "packages", "kernel", "memfd", "memlock", "open files", "memory", "cgroup memory", "huge pages", "NUMA", "clock", "GPU",
    "engines", "file system", "disk space", "O_DIRECT", "page cache",
}  # fmt: skip


def test_every_check_has_a_line_and_leaves_nothing_behind(tmp_path):
    done = call("doctor", "--path", tmp_path, "-o", "json", ok=None)
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
    assert len(call("doctor", "--path", tmp_path, "-o", "jsonl", ok=None).lines) == len(NAMES)


def test_a_failure_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_checks, "file_system_of", lambda directory: "nfs4")
    done = call("doctor", "--path", tmp_path, "-o", "json", ok=1)
    [found] = [check for check in done.document if check["level"] == "fail"]
    assert (found["name"], found["fix"][:16]) == ("file system", "use a local disk")


@pytest.mark.parametrize(
    ("release", "level"),
    [("6.18.1-x", Level.OK), ("6.4.0", Level.WARN), ("5.0.21", Level.FAIL), ("4.18.0-553.el8", Level.FAIL), ("odd", Level.FAIL)],
)
def test_kernels_are_told_apart(release, level, monkeypatch):
    monkeypatch.setattr(checks.platform, "release", lambda: release)
    [kernel] = [check for check in checks.machine_checks() if check.name == "kernel"]
    assert kernel.level is level


def test_a_machine_that_tells_nothing_gets_answers_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "read", lambda path: "")
    monkeypatch.setattr(checks, "installed", lambda package: "")
    found = {check.name: check for check in checks.machine_checks()}
    assert found["packages"].level is Level.FAIL
    assert found["engines"].found.startswith("none installed")
    assert found["cgroup memory"].found == "no limit"
    monkeypatch.setattr(storage_checks, "read", lambda path: "")
    assert storage_checks.file_system_of(tmp_path) == "unknown"


def test_doctor_loads_no_engine(tmp_path):
    import subprocess
    import sys

    code = (
        f"import sys; sys.argv = ['tiercache', 'doctor', '--path', {str(tmp_path)!r}]\n"
        "from tiercache.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'cupy', 'vllm', 'sglang', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"
