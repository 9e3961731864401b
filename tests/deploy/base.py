"""The folder `deploy`, and how its tests run the tools of others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tiercache.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def tool(name: str, package: str) -> str:
    """The path of a program, perhaps beside Python's; skips the test where it is missing."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"{name} is not installed: {package}")
    return found


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Output of a command that must succeed, on stdout and stderr together."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def turned_on(example: str) -> str:
    """An example configuration with the settings that it has turned off."""
    return re.sub(r"(?m)^#(?=\S)", "", example)


def parsed(program: str, *words: str) -> dict[str, Any]:
    """The arguments of a command of ours by name; fails where it has no such verb, option or argument."""
    assert program == "tiercache"
    found: Any = typer.main.get_command(app)
    context = found.make_context(program, [*words])
    while words := (*context._protected_args, *context.args):  # private: click's own way to the next command
        name, found, rest = found.resolve_command(context, [*words])
        context = found.make_context(name, rest, parent=context)
        if not hasattr(found, "resolve_command"):
            break
    return dict(context.params)
