"""deploy/README.md: every command of ours exists, and every file and link."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.deploy.base import DEPLOY, parsed

TEXT = (DEPLOY / "README.md").read_text()
BLOCKS = re.findall(r"(?ms)^```sh\n(.*?)^```", TEXT)
COMMANDS = sorted(
    {line for block in BLOCKS for line in block.splitlines() if line.startswith("tiercache ")}
    | {*re.findall(r"`(tiercache [^`]+)`", TEXT)}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_runbook_exists(command: str) -> None:
    parsed(*shlex.split(command))


def test_every_file_of_the_runbook_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    named = re.findall(r"(?<!/)\b((?:systemd|prometheus|container|compose|helm)/[\w.]+)", TEXT)
    assert [path for path in (*links, *named) if not (DEPLOY / path).exists()] == []
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"(?m)^#+ (.*)$", TEXT)
    }
    assert {*re.findall(r"\]\(#([^)]+)\)", TEXT)} <= anchors
