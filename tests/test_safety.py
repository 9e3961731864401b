"""No code is made from data, no shell is asked, no certificate goes unread: a walk over every Python file of
the four packages.

Names are followed through imports and aliases, so that `from pickle import loads as x` is found as well; a
self-test shows that each of them is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
SECURITY: Final = (ROOT / "SECURITY.md").read_text()
PACKAGES: Final = (
    ROOT / "tiercache",
    ROOT / "storage_backends/tiercache_backends",
    ROOT / "kernels/tiercache_kernels",
    ROOT / "lab/tiercache_lab",
)
FILES: Final = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

MODULES: Final = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty", "telnetlib",
    "crypt",
}  # fmt: skip
"""Modules that may not be used at all."""
BUILTINS: Final = {"eval", "exec", "compile", "__import__"}
CALLS: Final = {
    "torch.load", "torch.jit.load", "torch.hub.load", "numpy.lib.npyio.NpzFile", "yaml.load", "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load", "os.system", "os.popen", "os.execl", "os.execlp", "os.spawnl", "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp", "ssl._create_unverified_context", "ssl._create_stdlib_context", "ssl.CERT_NONE",
    "builtins.eval", "builtins.exec",
    "builtins.compile", "builtins.__import__", "code.InteractiveInterpreter", "runpy.run_path",
    "importlib.util.spec_from_file_location",
    "ctypes.pythonapi", "grpc.experimental.insecure_channel_credentials",
}  # fmt: skip
ALLOWED: Final = {
    # Counts one reference more, because the end of a client would crash or hang the interpreter at its exit.
    "storage_backends/tiercache_backends/mooncake/library.py": ["ctypes.pythonapi"],
    # Looks at the daemon's own certificate, in memory, whatever its names are.
    "tiercache/daemon/certificates.py": ["check_hostname = False"],
}
"""Exceptions, by file."""
ARRAYS: Final = {"numpy.load", "numpy.lib.format.read_array", "numpy.lib.npyio.load", "numpy.loadtxt"}
"""Array readers of numpy, which may load pickles if told to; at most two arguments go by position."""
SECRET: Final = re.compile(r"token|secret|salt|nonce|password|instance|session", re.IGNORECASE)
CHANCE: Final = ("random.", "numpy.random.")


class Walker(ast.NodeVisitor):
    """Collects what is forbidden: `found` says what, and in which line."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(node, alias.name)
            self._names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self._module(node, node.module)
            for alias in node.names:
                self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._reject(node, f"{node.module}.{alias.name}")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in BUILTINS and node.id not in self._names:
            self._note(node, node.id)
        else:
            self._reject(node, self._names.get(node.id, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None:
            self._reject(node, dotted)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func) or ""
        for word in node.keywords:
            constant = word.value.value if isinstance(word.value, ast.Constant) else word
            if word.arg == "shell" and constant is not False:
                self._note(node, f"{name}(shell=...)")
            if word.arg in ("allow_pickle", "trust_remote_code") and constant is not False:
                self._note(node, f"{name}({word.arg}=...)")
            if word.arg == "check_hostname" and constant is False:
                self._note(node, f"{name}(check_hostname=False)")
        if name in ARRAYS and len(node.args) > 2:
            self._note(node, f"{name} by position")
        if name in ("importlib.import_module", "getattr") and any(
            isinstance(a, ast.Constant) and a.value in MODULES | BUILTINS for a in node.args
        ):
            self._note(node, f"{name} of a forbidden name")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assigned(node, target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node, node.target, node.value)
        self.generic_visit(node)

    def _assigned(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        name = (
            target.attr
            if isinstance(target, ast.Attribute)
            else target.id
            if isinstance(target, ast.Name)
            else ""
        )
        if name == "check_hostname" and isinstance(value, ast.Constant) and value.value is False:
            self._note(node, "check_hostname = False")
        if SECRET.search(name) and any(
            (self._dotted(part) or "").startswith(CHANCE) for part in ast.walk(value)
        ):
            self._note(node, f"{name} by chance; use secrets")

    def _dotted(self, node: ast.AST) -> str | None:
        """The full name behind a name or attribute, aliases resolved."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self._dotted(node.value)) is not None:
            return f"{base}.{node.attr}"
        return None

    def _module(self, node: ast.stmt, module: str) -> None:
        if module.partition(".")[0] in MODULES:
            self._note(node, module)

    def _reject(self, node: ast.AST, dotted: str) -> None:
        if dotted in CALLS or dotted.partition(".")[0] in MODULES:
            self._note(node, dotted)

    def _note(self, node: ast.AST, what: str) -> None:
        self.found.append((getattr(node, "lineno", 0), what))


def forbidden(source: str) -> Iterator[tuple[int, str]]:
    walker = Walker()
    walker.visit(ast.parse(source))
    yield from walker.found


def test_nothing_of_it_is_in_the_packages() -> None:
    found = {str(path.relative_to(ROOT)): [what for _, what in forbidden(path.read_text())] for path in FILES}
    assert {path: names for path, names in found.items() if names} == ALLOWED


def test_every_test_that_the_security_page_names_is_there() -> None:
    """A file without a folder is in tests/daemon."""
    named = re.findall(r"`((?:tests/[\w/]+|(?:tests/[\w/]*/)?test_\w+)(?:\.py)?(?:::\w+)*)`", SECURITY)
    assert len(named) > 20
    for path, *inside in (name.split("::") for name in named):
        found = ROOT / path if "/" in path else ROOT / "tests/daemon" / path
        assert found.is_file() or [*found.rglob("test_*.py")], path
        for name in inside:
            assert re.search(rf"(?m)^ *(?:class|def) {name}\b", found.read_text()), f"{path}::{name}"


def test_the_packages_are_looked_at() -> None:
    assert len(FILES) > 150
    for package in PACKAGES:
        assert any(package in path.parents for path in FILES)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "from pickle import loads as x", "import _pickle",
        "from marshal import loads", "import shelve", "import cloudpickle", "import os.path, pickle",
        "eval('1')", "exec('x = 1')", "compile('1', '', 'eval')", "__import__('os')", "f = eval",
        "import builtins; builtins.exec('')", "from builtins import eval as e", "import torch; torch.load(f)",
        "import torch as t; t.load(f)", "from torch import load as l; l(f)", "from torch import load",
        "import numpy; numpy.load(f, allow_pickle=True)", "import numpy as np; np.load(f, allow_pickle=flag)",
        "from numpy import load as l; l(f, None, True)", "read_array(f, allow_pickle=True)",
        "import yaml; yaml.load(f)", "from yaml import load as l; l(f)", "import yaml as y; y.unsafe_load(f)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "from subprocess import Popen as P; P('ls', shell=flag)",
        "import subprocess; subprocess.getoutput('ls')", "import os; os.system('ls')",
        "import os as o; o.popen('ls')", "from os import system", "from os import system as s; s('ls')",
        "import tempfile; tempfile.mktemp()", "from tempfile import mktemp as m; m()",
        "import ssl; ssl._create_unverified_context()", "import ssl; c.verify_mode = ssl.CERT_NONE",
        "from ssl import CERT_NONE", "context.check_hostname = False",
        "import ssl; wrap(check_hostname=False)", "import random; token = random.randbytes(32)",
        "from random import getrandbits as g; salt = g(9)", "import random as r; self.nonce = r.random()",
        "from numpy import random; SECRET: bytes = random.bytes(32)",
        "import importlib; importlib.import_module('pickle')",
        "import builtins; getattr(builtins, 'eval')('1')", "load(model, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_walker_finds_it(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re; re.compile('x')", "from re import compile as c; c('x')", "model.eval()",
        "import numpy as np; np.load(f, allow_pickle=False)", "import yaml; yaml.safe_load(f)",
        "import subprocess; subprocess.run(['ls'])", "import subprocess; subprocess.run('ls', shell=False)",
        "import secrets; token = secrets.token_bytes(32)", "import random; wait = random.random()",
        "import tempfile; tempfile.mkstemp()", "import ssl; ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)",
        "def load(f): ...\nload(1)", "self.exec(x)", "import os; os.environ",
    ],
)  # fmt: skip
def test_the_walker_lets_the_harmless_pass(source: str) -> None:
    assert list(forbidden(source)) == []
