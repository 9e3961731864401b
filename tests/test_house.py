"""What holds for the tree as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tiercache_backends

import tiercache
from tests.__main__ import status_of
from tiercache import errors


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_tiercache_loads_neither_torch_nor_grpc():
    loaded = run("import tiercache, sys; print(' '.join(m for m in ('torch', 'grpc', 'transformers', 'lmdb') if m in sys.modules))")
    assert loaded.strip() == ""


def test_the_command_answers_help_without_loading_torch():
    assert run("import tiercache.cli.app, sys; print('torch' in sys.modules)").strip() == "False"


def test_the_stores_are_found_by_entry_points():
    found = {e.name: e.load() for e in entry_points(group="tiercache.storage_backends")}
    assert {"memory", "file", "lmdb", "grpc"} <= set(found)


@pytest.mark.parametrize(
    ("ends", "chosen", "status"),
    [
        ([0, 0], False, 0), ([0, 1], False, 1), ([1, 0], True, 1), ([0, -11], False, 1), ([-9, 0], True, 1), ([2, 1], False, 2),
        ([0, 5], True, 0), ([5, 0], True, 0), ([5, 5], True, 5), ([5, 0], False, 5), ([0, 5], False, 5), ([5, 1], True, 1),
    ],
)  # fmt: skip
def test_the_tests_pass_only_if_each_part_of_them_does(ends, chosen, status):
    assert status_of(ends, chosen=chosen) == status


def test_every_error_is_in_the_tree_that_its_module_draws():
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type):
            assert issubclass(value, errors.TierCacheError)
            assert name in drawn


def test_the_public_names_exist_and_the_version_is_the_distribution_s():
    from importlib.metadata import version

    assert all(hasattr(tiercache, name) for name in tiercache.__all__)
    assert tiercache.__version__ == version("tiercache")


FRAGMENT = re.compile(
    r"(Of|It|So|As|He|Who|Whom|Whose|What|Where|Which|They|Does|Is|Are|Has|Have|Did|Was|Were|May|Can|Must|That|And|But|Nobody)\b"
)
PACKAGES = (Path(tiercache.__file__).parent, Path(tiercache_backends.__file__).parent)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of all string literals that stand alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def test_every_docstring_stands_alone():
    """None begins as the rest of a sentence would, or as a question."""
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)
