"""The fenced blocks of a page, and what tests/docs/steps/ says about trying them.

The file `steps/NAME.txt` belongs to the page of that name (`deploy-README.txt` to deploy/README.md).
A line `> TEXT` names the next block of the page whose first line begins with TEXT. Below it stands what is
to be done with that block, if it is not simply run or looked at:

    not run, REASON     it is only looked at: its verbs, options, imports and settings must exist
    background, TEXT    it is started, and the page goes on when its output has this text
    until TEXT          it is repeated until its output has this text
    needs PROGRAM       it is run where this program is installed
    exit N              it must end with this exit code
    output              a block `text`: output of the block before, to the letter
    like                as `output`, except that blanks may differ, and what is marked in the text
    log                 as `like`, of what was started last, somewhere in it
    given NAME          a block `python`: it has the names that this function of tests/docs/given.py returns
    file PATH           a block `toml`: it is written into this file, for the commands behind it

In such a text `...` stands for anything, `<N>` for a number, `<SIZE>` for a number of bytes with its unit,
and `<TIME>` for a duration. In `like`, `log`, `background` and `until`, lines of tables may have any length.

Steps between blocks stand at the head of the file, or below the block that they follow:

    ports N, ...        these ports are replaced by free ones
    write A as B        in blocks that run, A is replaced by B; HERE is the folder in which the page is tried
    first COMMAND       this is run, because the page takes it for granted
    stop                what was started last gets Ctrl-C, and must end; `stop 0`: what was started first

Blocks that no line names: `sh` and `python` are run in order (all programs of a page as one), `toml` is a
configuration of the daemon that must be valid except for its files, `json`, `yaml` and `promql` are parsed,
and `text` is a drawing or output to look at.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from tests.docs.pages import ROOT

LANGUAGES = ("sh", "python", "toml", "json", "yaml", "promql", "text")
STEPS = Path(__file__).parent / "steps"
BETWEEN = ("ports", "write", "first", "stop")
"""Steps that belong to the page, not to one of its blocks."""
PART = re.compile(r"(?ms)^ *```(?P<language>\S*)\n(?P<text>.*?)^ *```$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a step between blocks (`language` is empty)."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        """Place of the block, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def verb(self) -> str:
        """First word of the step."""
        return self.mark.partition(" ")[0].rstrip(",")

    @property
    def rest(self) -> str:
        """The step behind its first word."""
        return self.mark.partition(" ")[2].strip()

    @property
    def reason(self) -> str | None:
        """Reason why the block is not run, if it has one."""
        return self.mark.partition(",")[2].strip() if self.mark.startswith("not run") else None


def steps_file(page: str) -> Path:
    """The file with the steps of a page."""
    return STEPS / (page.removeprefix("docs/").removesuffix(".md").replace("/", "-") + ".txt")


def blocks(page: str) -> list[Block]:
    """The blocks and steps of a page, in order; ValueError names a line of steps without its block."""
    text = (ROOT / page).read_text()
    found = [
        Block(
            page,
            text.count("\n", 0, part.start()) + 1,
            part["language"] or "nothing",
            textwrap.dedent(part["text"]),
            "",
        )
        for part in PART.finditer(text)
    ]
    path = steps_file(page)
    at = 0
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("> "):
            while not found[at:] or not (found[at].language and found[at].text.startswith(line[2:])):
                at += 1
                if at >= len(found):
                    raise ValueError(f"{path.name}: {page} has no block {line[2:]!r} there")
            at += 1
        elif line.startswith(BETWEEN):
            found.insert(at, Block(page, 0, "", "", line))
            at += 1
        else:
            found[at - 1] = replace(found[at - 1], mark=line)
    return found
