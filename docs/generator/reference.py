"""The pages of the reference: public names, verbs, configuration, examples and decisions."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

from tiercache.cli.app import app
from tiercache.cli.verbs import VERBS, other_verbs, verb_of
from tiercache.config.document import every_setting

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = (
    "tiercache",
    "tiercache.controller",
    "tiercache.pools",
    "tiercache.transfer",
    "tiercache.policy",
    "tiercache.storage",
    "tiercache.storage.wrappers",
    "tiercache.events",
    "tiercache.config",
    "tiercache.errors",
    "tiercache.integrations.transformers",
    "tiercache.testing.conformance",
)
"""Modules whose public names an engine, a store or a tool of somebody else uses."""

TERMINAL: Final = {"COLUMNS": "96", "TERM": "dumb"}
"""The environment in which the verbs print their help."""
CONFIGURATION: Final = """\
# Configuration

Settings of the daemon's TOML file; a few are flags of [`tiercache serve`](cli.md#tiercache-serve).
`tiercache config check FILE` checks a file.
"""


def pages() -> dict[str, str]:
    """Return the text of every page that is made, by its path below docs/."""
    made = {f"reference/{module}.md": module_page(module) for module in MODULES}
    made |= {f"examples/{path.stem}.md": example_page(path) for path in examples()}
    return made | {
        "reference/index.md": index_page(),
        "reference/cli.md": cli_page(),
        "reference/configuration.md": configuration_page(),
        "design/index.md": decisions_page(),
    }


def examples() -> list[Path]:
    """Return the programs of examples/, in the order of their names."""
    return sorted((ROOT / "examples").glob("*.py"))


def decisions() -> list[Path]:
    """Return the pages of docs/design/, in the order of their names."""
    return sorted((ROOT / "docs/design").glob("*.md"))


def example_page(path: Path) -> str:
    """Return a page with a program, under the first sentence of its docstring."""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) or path.name
    return f"# examples/{path.name}\n\n{said.splitlines()[0]}\n\n```python\n{text}```\n"


def decisions_page() -> str:
    """Return the list of the pages of design, by their titles."""
    rows = [f"- [{path.read_text().splitlines()[0].lstrip('# ')}]({path.name})" for path in decisions()]
    return "\n".join(["# Design", "", "Why each part is as it is, and which ways were rejected.", "", *rows])


def index_page() -> str:
    """Return the entry of the reference."""
    rows = [f"| [`{module}`]({module}.md) | {_summary(module)} |" for module in MODULES]
    return "\n".join(
        [
            "# Reference",
            "",
            "Verbs and their options are in [Command line](cli.md), settings of the daemon in",
            "[Configuration](configuration.md), what can be measured in [Metrics](../metrics.md).",
            "Public names by module:",
            "",
            "| module | what it is |",
            "|---|---|",
            *rows,
        ]
    )


def _source(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _summary(module: str) -> str:
    return (ast.get_docstring(_source(module)) or "").splitlines()[0]


def _public(module: str) -> Iterator[str]:
    """Names in `__all__`, or the classes of a module that has none."""
    tree = _source(module)
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                yield from (name for name in ast.literal_eval(value) if not name.startswith("__"))
                return
    yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def module_page(module: str) -> str:
    """Return the page of a module: its docstring, and each public name by mkdocstrings."""
    names = [f"::: {module}.{name}" for name in _public(module)]
    doc = ast.get_docstring(_source(module)) or ""
    # What a docstring indents is drawn; a fence keeps it as it is.
    return "\n\n".join([f"# {module}", doc, "## Names", *names]) + "\n"


def cli_page() -> str:
    """Return the help of every verb, as `--help` prints it."""
    parts = ["# Command line\n\nThe help of every verb, as `--help` prints it.\n", _help("##")]
    for name, verb in (VERBS | {name: verb_of(entry) for name, entry in other_verbs().items()}).items():
        parts.append(_help("##", name))
        parts += [_help("###", name, inner) for inner in getattr(verb.load(name), "commands", ())]
    return "\n".join(parts)


def _help(level: str, *words: str) -> str:
    said = CliRunner().invoke(app, [*words, "--help"], prog_name="tiercache", env=TERMINAL)
    assert said.exit_code == 0, said.output
    return f"{level} {' '.join(('tiercache', *words))}\n\n```text\n{said.stdout.strip()}\n```\n"


def configuration_page() -> str:
    """Return every setting of the daemon, as `tiercache config schema` lists them."""
    parts = [CONFIGURATION]
    group = None
    for setting, default, said in every_setting():
        table, _, name = setting.rpartition(".")
        if table != group:
            shown = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
            title = f"## `{shown}`" if table else "## The file"
            parts += ["", title, "", "| setting | default | meaning |", "|---|---|---|"]
            group = table
        shown = "" if default is None else f"`{json.dumps(default)}`"
        meaning = " ".join(said.split()).replace("|", "&#124;")
        parts.append(f"| `{name}` | {shown} | {meaning} |")
    return "\n".join(parts) + "\n"
