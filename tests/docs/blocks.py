"""The fenced blocks of a page, and what its comments say about their tests.

A comment `<!-- test: ... -->` is invisible to readers. Above a block it says what is to be done with it:

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

Alone it says something about the page:

    ports N, ...        these ports are replaced by free ones
    write A as B        in blocks that run, A is replaced by B; HERE is the folder in which the page is tried
    first COMMAND       this is run, because the page takes it for granted
    stop                what was started last gets Ctrl-C, and must end; `stop 0`: what was started first

Without a comment, `sh` and `python` are run in order (all programs of a page as one), `toml` is a
configuration of the daemon that must be valid except for its files, `json`, `yaml` and `promql` are parsed,
and `text` is a drawing or output to look at.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.pages import ROOT

LANGUAGES = ("sh", "python", "toml", "json", "yaml", "promql", "text")
PART = re.compile(
    r"(?ms)^ *<!-- test: (?P<mark>.*?) -->\n?(?=(?P<above> *```)?)"
    r"|^ *```(?P<language>\S*)\n(?P<text>.*?)^ *```$"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a comment that stands alone (`language` is empty)."""

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
        """First word of the comment."""
        return self.mark.partition(" ")[0].rstrip(",")

    @property
    def rest(self) -> str:
        """The comment behind its first word."""
        return self.mark.partition(" ")[2].strip()

    @property
    def reason(self) -> str | None:
        """Reason why the block is not run, if it has one."""
        return self.mark.partition(",")[2].strip() if self.mark.startswith("not run") else None


def blocks(page: str) -> Iterator[Block]:
    """The blocks and comments of a page, in order."""
    text = (ROOT / page).read_text()
    mark = ""
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["mark"] is not None:
            said = " ".join(part["mark"].split())
            if part["above"] is None:
                yield Block(page, line, "", "", said)
            else:
                mark = said
        else:
            yield Block(page, line, part["language"] or "nothing", textwrap.dedent(part["text"]), mark)
            mark = ""
