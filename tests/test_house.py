"""Rules that hold for the tree as a whole."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tiercache
from tests.__main__ import status_of
from tests.docs.pages import PAGES
from tests.order import ALONE, BESIDE, LONGEST
from tiercache import errors
from tiercache_distribution import DISTRIBUTION


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_an_import_loads_nothing_heavy():
    light = "import tiercache.config, tiercache.storage.registry, tiercache.cli.app, sys"
    heavy = {"torch", "grpc", "transformers", "pydantic", "lmdb", "pytest", "hypothesis"}
    code = f"from tiercache import HybridCacheController; {light}; print({heavy} & sys.modules.keys())"
    assert run(code) == "set()\n"


def test_the_stores_are_found_by_entry_points():
    found = {e.name: e.load() for e in entry_points(group="tiercache.storage_backends")}
    assert {"memory", "file", "lmdb", "grpc"} <= set(found)


@pytest.mark.parametrize(
    ("ends", "chosen", "status"),
    [
        ([0, 0], False, 0), ([0, 1], False, 1), ([1, 0], True, 1), ([0, -11], False, 1), ([-9, 0], True, 1),
        ([2, 1], False, 2),
        ([0, 5], True, 0), ([5, 0], True, 0), ([5, 5], True, 5), ([5, 0], False, 5), ([0, 5], False, 5),
        ([5, 1], True, 1),
    ],
)  # fmt: skip
def test_the_tests_pass_only_if_each_part_of_them_does(ends, chosen, status):
    assert status_of(ends, chosen=chosen) == status


def test_the_order_of_the_tests_names_files_that_are_there():
    assert [path for path in (*ALONE, *BESIDE, *LONGEST) if not (Path(__file__).parent / path).exists()] == []


def test_every_error_is_in_the_tree_that_its_module_draws():
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type):
            assert issubclass(value, errors.TierCacheError)
            assert name in drawn


def test_the_public_names_exist_and_the_version_is_the_distribution_s():
    from importlib.metadata import version

    assert all(hasattr(tiercache, name) for name in tiercache.__all__)
    assert {"HybridCacheController", "HybridStorage", "Worker", "open_backend"} <= set(tiercache.__all__)
    assert tiercache.__version__ == version(DISTRIBUTION)


ROOT = Path(__file__).parents[1]
TREES = {
    "tiercache": ROOT / "tiercache",
    "tiercache_backends": ROOT / "storage_backends" / "tiercache_backends",
    "tiercache_kernels": ROOT / "kernels" / "tiercache_kernels",
    "tiercache_lab": ROOT / "lab" / "tiercache_lab",
}
GENERATED = "tiercache.wire.v1"
WINGS = {
    "common ground": (
        "tiercache.errors", "tiercache.core", "tiercache.text", "tiercache.memory", "tiercache.keys",
        "tiercache.threads", "tiercache.entries", "tiercache.settings",
        "tiercache.geometry", "tiercache.models", "tiercache.policy", "tiercache.pools",
        "tiercache.metrics", "tiercache.events",
    ),
    "store wing": (
        "tiercache.storage", "tiercache_backends", "tiercache.wire", "tiercache.daemon", "tiercache.config",
        "tiercache.integrations.announcements",
        "tiercache.integrations.settings", "tiercache.integrations.sglang_server",
        "tiercache.integrations.sglang", "tiercache.integrations.vllm", "tiercache.integrations.lmcache",
        "tiercache.integrations.vllm_policy", "tiercache.integrations.policy_table",
        "tiercache.integrations.kvcr",
    ),
    "cache wing": (
        "tiercache.transfer", "tiercache_kernels", "tiercache.index", "tiercache.controller",
        "tiercache.integrations.torch_ranks", "tiercache.integrations.sglang_tree",
        "tiercache.integrations.transformers", "tiercache.integrations.vllm_connector",
    ),
    "lab": ("tiercache_lab",),
    "terminal": ("tiercache.cli",),
    "testing": ("tiercache.testing",),
}  # fmt: skip
"""Parts of the house, as docs/structure.md draws them."""


def modules() -> dict[str, Path]:
    """Every module by its dotted name, without those that `make proto` writes."""
    found = {}
    for name, tree in TREES.items():
        for path in tree.rglob("*.py"):
            dotted = ".".join((name, *path.relative_to(tree).with_suffix("").parts))
            found[dotted.removesuffix(".__init__")] = path
    return {name: path for name, path in found.items() if not inside(name, GENERATED)}


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


MODULES = modules()
SOURCES = sorted([*MODULES.values(), *(ROOT / "tests").rglob("*.py")])
"""Every file of the product and of its tests."""


@cache
def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # all trees stay, and to walk over them again and again takes three times as long as parsing
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()


def test_every_module_has_one_place_in_the_house():
    rooms = {name: [wing for wing, parts in WINGS.items() if inside(name, *parts)] for name in MODULES}
    homeless = {name for name, wings in rooms.items() if len(wings) != 1}
    assert homeless == {"tiercache", "tiercache.integrations"}


@pytest.mark.parametrize("wing", WINGS)
def test_no_two_public_classes_of_a_wing_share_a_name(wing):
    places: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if inside(name, *WINGS[wing]):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


MAX_FLOORS = 6
"""Modules of a package, at most, of which each imports the next."""


@cache
def imports(path: Path) -> frozenset[str]:
    """Names that a module imports when it runs."""
    found, later = set[str](), list[ast.AST]([tree_of(path)])
    while later:
        node = later.pop()
        match node:
            case ast.If(test=test) if ast.unparse(test).endswith("TYPE_CHECKING"):
                continue
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{alias.name}" for alias in names)}
        later += ast.iter_child_nodes(node)
    return frozenset(found)


def test_no_package_is_deeper_than_six_floors():
    """A floor is a module that imports the one below; the modules of one folder count."""
    rooms = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    floors: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in floors:
            floors[name] = 0  # a circle, which only imports for types make, counts once
            package = name.rpartition(".")[0]
            below = {n for n in imports(MODULES[name]) & rooms - {name} if n.rpartition(".")[0] == package}
            floors[name] = 1 + max(map(floor, below), default=0)
        return floors[name]

    assert [name for name in sorted(rooms) if floor(name) > MAX_FLOORS] == []


def test_the_tour_names_every_folder():
    named = re.findall(r"`([\w/.]+)/`", (ROOT / "docs" / "structure.md").read_text())
    assert len(named) == len(set(named))
    folders = {path.relative_to(ROOT).parent.as_posix() for path in MODULES.values()}
    assert sorted(folders - set(named)) == []
    assert [name for name in named if not (ROOT / name).is_dir()] == []


MARKDOWN_WORDS = 50_000
"""Words of all texts together, at most, as `wc -w` counts them."""


def test_the_texts_stay_short():
    """A longer page is paid for by a shorter one."""
    words = {page: len((ROOT / page).read_text().split()) for page in PAGES}
    assert sum(words.values()) <= MARKDOWN_WORDS, sorted(words.items(), key=lambda row: -row[1])[:10]


BUDGET = {
    "tiercache.daemon": 8_868,
    "tiercache.controller": 8_965,
    "tiercache.integrations": 9_686,
    "tiercache.cli": 5_550,
    "tiercache.storage": 6_355,
    "tiercache.testing": 2_650,
    "tiercache.index": 3_250,
    "tiercache.transfer": 2_150,
    "tiercache.config": 1_419,
    "tiercache.models": 1_100,
    "tiercache.events": 1_100,
    "tiercache.pools": 1_046,
    "tiercache.policy": 900,
    "tiercache.metrics": 750,
    "tiercache.wire": 750,
    "tiercache_backends.file": 4_170,
    "tiercache_backends.lmdb": 2_680,
    "tiercache_backends.chain": 3_400,
    "tiercache_backends.s3": 2_550,
    "tiercache_backends.grpc": 2_200,
    "tiercache_backends.mooncake": 1_950,
    "tiercache_backends.local": 720,
    "tiercache_lab.replay": 5_570,
    "tiercache_lab.bench": 1_780,
    "tiercache_lab.prove": 1_150,
    "tiercache_lab.demo": 1_200,
    "tiercache_lab.policies": 350,
    "": 2_700,
}  # fmt: skip
"""Lines of each package at most; "" is what lies outside them. Whoever raises a row lowers another one."""
WHEEL_LINES, LAB_LINES, TEST_LINES = 74_240, 10_000, 75_000
"""Lines of the product's wheel, of the lab's, and of the tests, at most."""
FILES = 328
"""Modules of the product's wheel at most."""


def test_no_package_is_larger_than_its_budget():
    lines = dict.fromkeys(BUDGET, 0)
    for name, path in MODULES.items():
        room = next((room for room in BUDGET if room and inside(name, room)), "")
        lines[room] += len(lines_of(path))
    assert {room: count for room, count in lines.items() if count > BUDGET[room]} == {}
    loose = {room: count for room, count in lines.items() if count + 300 < BUDGET[room]}
    assert loose == {}, "the house has become smaller: lower these rows"
    in_lab = sum(len(lines_of(path)) for name, path in MODULES.items() if inside(name, "tiercache_lab"))
    assert in_lab <= LAB_LINES
    assert sum(lines.values()) - in_lab <= WHEEL_LINES


@pytest.mark.parametrize("package", [name for name in BUDGET if name])
def test_a_package_begins_with_its_principles(package):
    head = ast.get_docstring(tree_of(MODULES[package])) or ""
    _, _, rest = head.partition("\n\nPrinciples:\n\n")
    assert re.match(r"(?:\d\. [^\n]*\.(?:\n|$)){3,6}(?:\n|$)", rest)


def test_the_tests_are_no_larger_than_their_budget():
    lines = sum(len(lines_of(path)) for path in (ROOT / "tests").rglob("*.py"))
    assert TEST_LINES - 2_000 < lines <= TEST_LINES, "lower the budget, or make room elsewhere"


def test_the_wheel_has_few_files():
    assert sum(not inside(name, "tiercache_lab") for name in MODULES) <= FILES


PRAGMA = re.compile(r"  # (noqa: \w+|type: ignore\[[\w-]+\])$")


def test_no_line_is_wider_than_110_columns():
    wide = [
        f"{path}:{number}"
        for path in SOURCES
        for number, line in enumerate(lines_of(path), 1)
        if len(PRAGMA.sub("", line)) > 110
    ]
    assert wide == []


@pytest.mark.parametrize("text", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs"])
def test_no_line_of_a_text_is_wider_than_120_columns(text):
    """Tables, code, addresses and the two pages that a script writes may be wider."""
    found = ROOT / text
    paths = list(found.rglob("*.md")) if found.is_dir() else [found]
    wide = []
    for path in paths:
        if path.name in ("metrics.md", "models.md"):
            continue
        code = False
        for number, line in enumerate(lines_of(path), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > 120 and not code and not line.lstrip().startswith("|") and "://" not in line:
                wide.append(f"{path.name}:{number}")
    assert wide == []


FRAGMENT = re.compile(
    r"(Of|It|So|As|He|Who|Whom|Whose|What|Where|Which|They|Does|Is|Are|Has|Have|Did|Was|Were|May|Can|Must|"
    r"That|And|But|Nobody)\b"
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of all string literals that stand alone."""
    later: list[ast.AST] = [tree_of(path)]  # statements: all other nodes are ten times as many
    for node in later:
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            later += getattr(node, block, ())
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def test_every_docstring_stands_alone():
    """None begins as the rest of a sentence would, or as a question."""
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)


PRIVATE = re.compile(r"_(?!_|replace$|asdict$|fields$|make$)\w")
"""A private name; the methods of named tuples begin alike and are public."""
DEFINED = re.compile(
    r"(?:\bdef |\bclass |\b(?:self|cls)\.|\bas )(_(?!_)\w+)|(?:^ *|, )(_(?!_)\w+)(?=[\w, ]* ?[:=])",
    re.MULTILINE,
)
"""Definition of a private name in a module: a function, a class, an attribute, a variable."""
BY_NAME = ("getattr", "setattr", "delattr", "hasattr", "object", "patch")
"""Functions and methods to which an attribute's name is given as text."""


def defined(text: str) -> set[str]:
    return {named or assigned for named, assigned in DEFINED.findall(text)}


def uses_of_private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names of attributes of other objects, of imports, and of what is patched by its name."""
    for node in ast.walk(tree):
        used: list[tuple[int, str]] = []
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                used = [(node.end_lineno or node.lineno, node.attr)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used = [(alias.lineno, part) for alias in node.names for part in alias.name.split(".")]
            used += [(node.lineno, part) for part in (getattr(node, "module", None) or "").split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            texts = [arg for arg in node.args if isinstance(arg, ast.Constant)]
            used = [(arg.lineno, part) for arg in texts for part in str(arg.value).split(".")]
        yield from ((line, name) for line, name in used if PRIVATE.match(name))


def test_private_names_of_the_product_are_used_with_a_reason_only():
    """A comment `# private: ...` on the line or just above says why nothing public would do."""
    private = set().union(*(defined(path.read_text()) for path in MODULES.values()))
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == "integrity.py":  # it recounts everything, also what is private
            continue
        text = path.read_text()
        others = private - defined(text)
        if others.isdisjoint(re.findall(r"\b_\w+", text)):
            continue
        lines = ["", *text.splitlines()]
        for line, name in uses_of_private_names(tree_of(path)):
            if name in others and not (
                re.search(r"# private: \w", lines[line]) or re.match(r" *# private: \w", lines[line - 1])
            ):
                found.append(f"{path}:{line}: {name}")
    assert not found, "\n".join(found)
