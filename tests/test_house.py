"""What holds for the tree as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tiercache
from tiercache import errors

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for part in ("tiercache", "storage_backends", "kernels") for p in (ROOT / part).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load"), ("os", "system")}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_tiercache_loads_neither_torch_nor_grpc():
    loaded = run("import tiercache, sys; print(' '.join(m for m in ('torch', 'grpc', 'transformers', 'lmdb') if m in sys.modules))")
    assert loaded.strip() == ""


def test_the_command_answers_help_without_loading_torch():
    assert run("import tiercache.cli.app, sys; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_code_is_made_from_data(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {n.split(".")[0] for n in names} & FORBIDDEN_MODULES, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in FORBIDDEN_ATTRIBUTES, f"{path}:{node.lineno}"


def test_the_stores_are_found_by_entry_points():
    found = {e.name: e.load() for e in entry_points(group="tiercache.storage_backends")}
    assert {"memory", "file"} <= set(found)


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
