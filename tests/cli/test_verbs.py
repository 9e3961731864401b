"""Verbs of other packages: found by entry points of packages that are really installed, and refused in one
sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tiercache.cli import verbs

GUARD = 120
MODULES = {
    "greeting/__init__.py": "",
    "greeting/verbs.py": """\
from tiercache.cli.verbs import Verb

HELLO = Verb("greeting.hello:hello", "Greet somebody.", extra="")
STATUS = Verb("greeting.hello:hello", "Greet instead of the status.")
LACKING = Verb("greeting.lacking:greet", "Greet from afar.", extra="")
OLDER = Verb("greeting.older:hello", "Greet as before.", extra="")
TEXT = "Greet somebody."
""",
    "greeting/hello.py": """\
from typing import Annotated

import typer

from tiercache.errors import InputError

print("imported")


def hello(name: Annotated[str, typer.Argument()]) -> None:
    \"\"\"Greet somebody.\"\"\"
    if name == "nobody":
        raise InputError("nobody cannot be greeted")
    print(f"hello {name}")
""",
    "greeting/lacking.py": "import a_package_that_nobody_has\n",
    "greeting/older.py": "from tiercache.errors import WhatIsGone\n",
    "greeting/raising.py": "raise ValueError('no terminal for \\x1b[31m')\n",
    "greeting/leaving.py": "raise SystemExit\n",
}


def installed(folder: Path, **verbs: str) -> Path:
    """Install a package `greeting` with these verbs into a folder, as pip would."""
    for name, text in MODULES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    info = folder / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in verbs.items()]
    (info / "entry_points.txt").write_text("".join(["[tiercache.verbs]\n", *lines]))
    return folder


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "tiercache")
    variables = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "120"}
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=GUARD, env=variables)


def test_a_package_adds_a_verb(tmp_path: Path) -> None:
    folder = installed(tmp_path, hello="greeting.verbs:HELLO")
    said = command(folder, "--help")
    assert (said.returncode, said.stderr) == (0, "")
    assert [line.split() for line in said.stdout.splitlines() if "hello" in line] == [
        ["hello", "Greet", "somebody."]
    ]
    assert "imported" not in said.stdout  # what only the verb itself needs
    done = command(folder, "hello", "you")
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported\nhello you\n", "")
    done = command(folder, "hello", "nobody")
    assert (done.returncode, done.stderr) == (2, "tiercache: nobody cannot be greeted\n")
    assert "Exit codes: " in command(folder, "hello", "--help").stdout
    assert "did you mean 'hello'?" in command(folder, "hullo").stderr.lower()


@pytest.mark.parametrize("name", verbs.LAB)
def test_a_verb_of_the_lab_says_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {entry.dist.name for entry in verbs.other_verbs().values() if entry.dist} == {"tiercache-lab"}
    assert sorted(verbs.other_verbs()) == sorted(verbs.LAB)
    monkeypatch.setattr(verbs, "other_verbs", dict)
    done = call(name, "--help", ok=2)
    assert (done.out, done.err) == (
        "",
        f"tiercache: tiercache {name} is in the package tiercache-lab, which is not installed: pip install"
        " path/to/checkout/lab\n",
    )


def test_a_package_cannot_replace_a_verb(tmp_path: Path) -> None:
    folder = installed(tmp_path, status="greeting.verbs:STATUS")
    assert "Greet" not in command(folder, "--help").stdout
    assert "Greet" not in command(folder, "status", "--help").stdout


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("greeting.gone:HELLO", "needs a package that is not installed (No module named 'greeting.gone')"),
        ("greeting.verbs:GONE", "cannot be imported: module 'greeting.verbs' has no attribute 'GONE'"),
        (
            "greeting.raising:HELLO",
            r"cannot be imported: no terminal for \x1b[31m; install that package again",
        ),
        ("greeting.leaving:HELLO", "cannot be imported: SystemExit; install that package again"),
        ("greeting.verbs:TEXT", "is greeting.verbs:TEXT, which is not a Verb; fix its entry point"),
    ],
)
def test_a_broken_verb_breaks_no_other(tmp_path: Path, value: str, sentence: str) -> None:
    folder = installed(tmp_path, broken=value, hello="greeting.verbs:HELLO")
    called = command(folder, "broken")
    assert (called.returncode, called.stdout) == (2, "")
    listed = command(folder, "--help")
    assert listed.returncode == 0
    assert "hello" in listed.stdout
    assert called.stderr == listed.stderr
    assert called.stderr.startswith(f"tiercache: the verb 'broken' {sentence}")
    assert called.stderr.count("\n") == 1
    assert command(folder, "hello", "you").stderr == ""


def test_a_verb_whose_package_lacks_another_says_which(tmp_path: Path) -> None:
    done = command(installed(tmp_path, far="greeting.verbs:LACKING"), "far")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tiercache: tiercache far needs a package that is not installed"
        " (No module named 'a_package_that_nobody_has'); install it\n"
    )


def test_a_verb_of_a_package_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = command(installed(tmp_path, old="greeting.verbs:OLDER"), "old")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "tiercache: tiercache old cannot be imported: cannot import name 'WhatIsGone'"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("tiercache hel", "hello\n"),
        ("tiercache broken --hel", "--help\n"),
        ("tiercache hello --hel", "--help\n"),
    ],
)
def test_a_broken_verb_does_not_speak_while_a_shell_completes(
    tmp_path: Path, line: str, completed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(tmp_path, broken="greeting.raising:HELLO", hello="greeting.verbs:HELLO")
    monkeypatch.setenv("_TIERCACHE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    done = command(folder)
    assert (done.stdout.replace("imported\n", ""), done.stderr) == (completed, "")
