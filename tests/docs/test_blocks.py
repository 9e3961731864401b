"""Every fenced block of the texts has a decision, and the names in it exist, also where it is not run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.store.test_samples import call
from tests.deploy.base import parsed, tool
from tests.docs.blocks import BETWEEN, LANGUAGES, STEPS, Block, blocks, steps_file
from tests.docs.pages import PAGES, ROOT, prose
from tiercache_lab.replay.machines import machine_named

ALL = [block for page in PAGES for block in blocks(page)]
VERBS_OF = {
    "": set(BETWEEN), "sh": {"", "not", "background", "exit", "needs", "until"},
    "python": {"", "not", "given"}, "text": {"", "like", "log", "output"}, "toml": {"", "not", "file"},
}  # fmt: skip
"""Steps that a block of a language may have; other languages have none."""


def of(language: str) -> list[object]:
    return [pytest.param(block, id=block.where) for block in ALL if block.language == language]


def commands(text: str) -> Iterator[list[str]]:
    """Words of our commands in a script, without what a shell does with their output."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0].rpartition("/")[2] == "tiercache" and words[1:] != ["--version"]:
            end = next((n for n, word in enumerate(words) if re.match(r"\d?[>|&]", word)), len(words))
            yield ["tiercache", *(word for word in words[1:end] if word != "--help")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_decision(page: str) -> None:
    for block in (block for block in ALL if block.page == page):
        assert block.language in ("", *LANGUAGES), f"{block.where}: what is in this block?"
        assert block.verb in VERBS_OF.get(block.language, {""}), f"{block.where}: {block.mark}"
        assert block.reason != "", f"{block.where}: why is it not run?"
        for path in re.findall(r"tests/[\w/.]+", block.mark):
            assert (ROOT / path.rstrip(".")).exists(), f"{block.where}: {path}"


def test_every_file_of_steps_has_its_page() -> None:
    assert set(STEPS.iterdir()) - {steps_file(page) for page in PAGES} == set()


@pytest.mark.parametrize("block", of("sh"))
def test_verbs_and_options_of_commands_exist(block: Block) -> None:
    for words in commands(block.text):
        parsed(*words)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_verbs_and_options_in_sentences_exist(page: str) -> None:
    for code in re.findall(r"`(tiercache [a-z][^`]*)`", prose(page)):
        words = [word for word in shlex.split(" ".join(code.split())) if word != "..."]
        for name in (word.partition("=")[0] for word in words if word.startswith("-")):
            said = call(*[word for word in words[1:3] if word.isalpha() and word.islower()], "--help").out
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said), code


@pytest.mark.parametrize("block", of("python"))
def test_imports_of_programs_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiercache"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", of("toml"))
def test_configurations_are_valid(block: Block, tmp_path: Path) -> None:
    tomllib.loads(block.text)
    if "[prefill]" in block.text:
        (tmp_path / "machine.toml").write_text(block.text)
        machine_named(str(tmp_path / "machine.toml"))
    elif block.reason is None:
        (tmp_path / "node.toml").write_text(re.sub(r"\d+[GT]iB", "64MiB", block.text))
        call("config", "check", "--no-files", "--no-ports", str(tmp_path / "node.toml"))


@pytest.mark.parametrize("block", [*of("json"), *of("yaml")])
def test_documents_can_be_parsed(block: Block) -> None:
    json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    expressions = [block.text for block in ALL if block.language == "promql"]
    rules = [{"record": f"page:{n}", "expr": text} for n, text in enumerate(expressions)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}))
    promtool = tool("promtool", "Debian's prometheus")
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
