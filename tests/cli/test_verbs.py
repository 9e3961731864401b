"""Verbs of other packages, found by entry points of installed packages, or refused in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.serving import GUARD
from tests.cli.store.test_samples import call
from tiercache.cli import verbs

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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Install a package `greeting` with the given verbs into a folder, as pip would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    yield lambda **verbs: written(tmp_path, verbs)
    for name in [name for name in sys.modules if name.partition(".")[0] == "greeting"]:
        del sys.modules[name]


def written(folder: Path, verbs: Mapping[str, str]) -> Path:
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


def test_a_package_adds_a_verb(install: Callable[..., Path]) -> None:
    install(hello="greeting.verbs:HELLO")
    listed = call("--help")
    assert [line.split() for line in listed.out.splitlines() if "hello" in line] == [
        ["hello", "Greet", "somebody."]
    ]
    assert "imported" not in listed.out + listed.err  # what only the verb itself needs
    done = call("hello", "you")
    assert (done.out, done.err) == ("imported\nhello you\n", "")
    assert call("hello", "nobody", ok=2).err == "tiercache: nobody cannot be greeted\n"
    assert "Exit codes: " in call("hello", "--help").out
    assert "did you mean 'hello'?" in call("hullo", ok=2).err.lower()


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


def test_a_package_cannot_replace_a_verb(install: Callable[..., Path]) -> None:
    install(status="greeting.verbs:STATUS")
    assert "Greet" not in call("--help").out
    assert "Greet" not in call("status", "--help").out


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
def test_a_broken_verb_breaks_no_other(install: Callable[..., Path], value: str, sentence: str) -> None:
    install(broken=value, hello="greeting.verbs:HELLO")
    called, listed = call("broken", ok=2), call("--help")
    assert called.out == ""
    assert "hello" in listed.out
    assert called.err == listed.err
    assert called.err.startswith(f"tiercache: the verb 'broken' {sentence}")
    assert called.err.count("\n") == 1
    assert call("hello", "you").err == ""


@pytest.mark.parametrize(
    ("verb", "sentence"),
    [
        ("LACKING", "needs a package that is not installed (No module named 'a_package_that_nobody_has')"),
        ("OLDER", "cannot be imported: cannot import name 'WhatIsGone'"),
    ],
)
def test_a_verb_whose_imports_fail_says_why(install: Callable[..., Path], verb: str, sentence: str) -> None:
    install(far=f"greeting.verbs:{verb}")
    done = call("far", ok=2)
    assert done.out == ""
    assert done.err.startswith(f"tiercache: tiercache far {sentence}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "completed"), [("tiercache hel", "hello\n"), ("tiercache broken --hel", "--help\n")]
)
def test_a_broken_verb_does_not_speak_while_a_shell_completes(install, line, completed):
    folder = install(broken="greeting.raising:HELLO", hello="greeting.verbs:HELLO")
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "tiercache")], capture_output=True, text=True, timeout=GUARD,
        env=os.environ | words | {"_TIERCACHE_COMPLETE": "complete_bash"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (completed, "")
