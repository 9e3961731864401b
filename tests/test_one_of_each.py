"""Rules that keep the product small: each thing once, no cupboards, nothing without a caller.

Each rule has a table of its present exceptions. A table may only become shorter: what is new is merged,
called or renamed instead.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests.test_house import BUDGET, MODULES, ROOT, imports, inside, lines_of, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(name: str) -> ast.Module:
    return tree_of(MODULES[name])


@cache
def classes(name: str) -> list[ast.ClassDef]:
    """Classes of a module, with those inside others."""

    def within(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield node
                yield from within(node.body)

    return list(within(tree(name).body))


def imported(name: str) -> frozenset[str]:
    return imports(MODULES[name])


def methods(made: ast.ClassDef) -> list[Function]:
    return [node for node in made.body if isinstance(node, Function)]


def decorators(node: Function | ast.ClassDef) -> str:
    return " ".join(ast.unparse(found) for found in node.decorator_list)


def bases(made: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in made.bases]


ONE_OF_EACH = {
    "a deadline": (r"Deadline|Timeout|Patience", ("Deadline", "Patience")),
    "a guard of calls": (r"Breaker|Guard", ("Guard", "Breaker")),
    "an order of eviction": (
        r"^_?(Evict(?!ing)\w*(Order|Queue)|\w*Sweep)$", ("EvictionOrder", "EvictionQueue", "Sweep", "_Sweep"),
    ),
    "a write-back": (r"WriteBack|Backlog", ("Backlog", "WriteBack")),
    "a setting": (r"^_?(Setting|Option|Fields?)$", ("Setting", "Option", "Fields", "_Fields")),
    "a counter": (
        r"(Counters?|Counts|Tally)$",
        (
            "Counter", "Counters", "Counts", "ErrorCounters", "OpeningCounter", "Tally",
            "VerifyCounts", "_Counters", "_Counts",
        ),
    ),
}  # fmt: skip
"""Things that are most often made twice: a pattern of class names, and the classes. Use the first."""
ONE_PLACE = {
    "heapq": (
        "tiercache.policy", "tiercache.storage.eviction", "tiercache.daemon.call_log",
        "tiercache_backends.memory",
        "tiercache_lab.replay.queueing", "tiercache_lab.replay.sources",
    ),
    "prometheus_client": (
        "tiercache.metrics", "tiercache.daemon.http.routes", "tiercache.daemon.node_metrics",
    ),
    "rich.table": (
        "tiercache.cli.terminal", "tiercache_lab.demo.command", "tiercache_lab.prove",
        "tiercache_lab.replay.verb",
    ),
    "rich.tree": ("tiercache.cli.store.inspect",),
}  # fmt: skip
"""Modules that only one place needs, and those that still do: heaps, exports of metrics, tables, trees."""


@pytest.mark.parametrize("thing", ONE_OF_EACH)
def test_there_is_one_of_each(thing):
    """A second one fails: use the first, or merge the two."""
    pattern, known = ONE_OF_EACH[thing]
    found = Counter(made.name for name in MODULES for made in classes(name) if re.search(pattern, made.name))
    assert found - Counter(known) == Counter()


@pytest.mark.parametrize("needed", ONE_PLACE)
def test_one_place_needs_it(needed):
    found = {name for name in MODULES if needed in imported(name)}
    assert {name for name in found if not inside(name, *ONE_PLACE[needed])} == set()


CUPBOARD = 120
"""Lines below which a module with one importer is a part of it that lies in another file."""
CUPBOARDS = frozenset({
    "tiercache.testing.conformance.damage", "tiercache_backends.chain.scans", "tiercache_backends.lmdb.check",
    "tiercache_kernels.reference", "tiercache_lab.bench.raw", "tiercache_lab.demo.small",
})  # fmt: skip
"""Modules that are still cupboards, or are one for a reason."""


def surface(name: str) -> bool:
    """Whether a module is found without an import: a package, a verb, a policy, a tool for authors."""
    rooms = (
        "tiercache.cli", "tiercache.cli.store", "tiercache.testing", "tiercache.policy",
        "tiercache_lab.policies",
    )  # fmt: skip
    return MODULES[name].name in ("__init__.py", "__main__.py") or name.rpartition(".")[0] in rooms


def test_no_small_module_has_only_one_importer():
    importers: dict[str, set[str]] = {name: set() for name in MODULES}
    for name in MODULES:
        for other in imported(name) & MODULES.keys() - {name}:
            importers[other].add(name)
    found = {
        name: next(iter(users))
        for name, users in importers.items()
        if len(users) == 1 and not surface(name) and len(lines_of(MODULES[name])) < CUPBOARD
    }
    assert {name: user for name, user in found.items() if name not in CUPBOARDS} == {}


SINGLE = frozenset({
    "CudaDevice", "Customer", "DeviceTensor", "Fence", "RankGroup", "SharedMemory", "_Tracked",
})  # fmt: skip
"""Abstract classes and protocols that have one implementation, or none."""
OUTSIDE = frozenset({"Units", "Source", "Host", "Hosts", "Node"})
"""Those whose implementations the search does not see: generic, of entry points, or of users of a suite."""


def test_an_abstract_class_has_two_implementations():
    """A protocol's are the classes that have its methods."""
    every = {made.name: made for name in MODULES for made in classes(name)}
    below: dict[str, set[str]] = {}
    for made in every.values():
        for base in bases(made):
            below.setdefault(base, set()).add(made.name)

    def descendants(name: str) -> set[str]:
        return {one for child in below.get(name, ()) for one in ({child} | descendants(child))}

    few = set()
    for made in every.values():
        protocol = "Protocol" in bases(made)
        if not (protocol or any("abstractmethod" in decorators(method) for method in methods(made))):
            continue
        wanted = {method.name for method in methods(made)} - {"__call__"}
        found = descendants(made.name)
        if protocol and not wanted:
            continue
        if protocol:
            found |= {other.name for other in every.values() if wanted <= {m.name for m in methods(other)}}
        if len(found - {made.name}) < 2:
            few.add(made.name)
    assert few - SINGLE - OUTSIDE == set()


PLAIN = ("ABC", "Protocol", "Generic", "NamedTuple", "Enum", "Exception", "ValueError", "object")
"""Bases that call no method of a name of ours."""
CALLED_FROM_OUTSIDE = r"command|Command|callback|validator|serializer|overload|setter|fixture|computed_field"
"""Decorators of functions that a library calls."""


def names_of_surface() -> set[str]:
    """Names that others may use: in an `__all__`, on a page, in an example, an entry point."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    pages += [ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml"]
    found = {word for page in pages for word in re.findall(r"\w+", page.read_text())}
    for name in MODULES:
        for node in tree(name).body:
            if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
                found |= {word.value for word in ast.walk(node.value) if isinstance(word, ast.Constant)}
    return found


def uses(node: ast.AST) -> Counter[str]:
    """How often a name is read in the code, as a variable, an attribute or a text of one word."""
    found: Counter[str] = Counter()
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name, asname=str()):
                found[name] += 1
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.:]+", text):
                found.update(re.split("[.:]", text))
            case ast.Assign(targets=[ast.Name(id="__all__")]):  # a list of names uses none of them
                found.subtract(word.value for word in ast.walk(inner.value) if isinstance(word, ast.Constant))
    return found


def test_everything_has_a_caller_in_the_product():
    """A method counts as called if any attribute of its name is; tests are no callers."""
    used: Counter[str] = Counter()
    for name in MODULES:
        used.update(uses(tree(name)))
    surface = names_of_surface()
    every = {made.name: made for name in MODULES for made in classes(name)}

    def overrides(made: ast.ClassDef, method: str) -> bool:
        """Whether a base has the method, or is not ours and may have it."""
        return any(
            method in {m.name for m in methods(every[base])} or overrides(every[base], method)
            if base in every
            else base not in PLAIN
            for base in bases(made)
        )

    found = set()
    for name in (name for name in MODULES if not inside(name, "tiercache.testing")):
        owners = [(None, tree(name).body), *((made, made.body) for made in classes(name))]
        for made, body in owners:
            for node in body:
                if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                    continue
                if made is not None and made.name.startswith("_"):
                    continue
                if node.name in surface or re.search(CALLED_FROM_OUTSIDE, decorators(node)):
                    continue
                if made is not None and overrides(made, node.name):
                    continue
                if used[node.name] > uses(node)[node.name]:
                    continue
                found.add(f"{made.name}.{node.name}" if made is not None else node.name)
    assert found == set()


METHODS = 30
LARGE = {
    "StoreState": 48, "Admission": 42, "Residents": 36, "RestorablePages": 34, "MemoryBackend": 33,
    "HybridIndex": 32, "HybridCacheController": 32, "TierCacheStorage": 31, "GrpcBackend": 31,
}  # fmt: skip
"""Classes of more methods, and how many they may have."""
ARGUMENTS = 10
MANY_ARGUMENTS = {"HybridCacheController": 12}
"""Classes whose constructor has more arguments, and how many it may have."""


def test_no_class_has_too_many_methods():
    found = {made.name: len({m.name for m in methods(made)}) for name in MODULES for made in classes(name)}
    assert {name: count for name, count in found.items() if count > LARGE.get(name, METHODS)} == {}


def test_no_constructor_has_too_many_arguments():
    found = {
        made.name: len(init.args.args) + len(init.args.kwonlyargs) - 1
        for name in MODULES
        for made in classes(name)
        for init in methods(made)
        if init.name == "__init__"
    }
    assert {n: count for n, count in found.items() if count > MANY_ARGUMENTS.get(n, ARGUMENTS)} == {}


BARE_VERBS = ("take", "add", "of", "follow", "left", "end", "begin", "most", "least")
BARE = {
    "tiercache.daemon": 24, "tiercache.controller": 22, "tiercache.storage": 13, "tiercache.index": 7,
    "tiercache_backends.mooncake": 7, "tiercache_backends.chain": 7, "tiercache.integrations": 6,
    "tiercache_lab.replay": 5, "tiercache.cli": 3, "tiercache.testing": 3, "tiercache_backends.grpc": 3,
    "tiercache_backends.lmdb": 3, "tiercache_backends.s3": 3, "tiercache.policy": 2, "tiercache.events": 2,
    "tiercache_backends.local": 2, "tiercache.metrics": 1, "tiercache.pools": 1,
    "tiercache_backends.file": 1, "tiercache_lab.policies": 1,
}  # fmt: skip
"""Public functions and methods of each package that are called by such a verb alone, at most."""


def test_a_public_name_has_a_noun():
    """`grep` must find the callers of a public method: `take_slot`, `Share.of_namespace`."""
    found: dict[str, list[str]] = {}
    for name in MODULES:
        room = next((room for room in BUDGET if room and inside(name, room)), "")
        for made in [tree(name), *classes(name)]:
            if not getattr(made, "name", "").startswith("_"):
                verbs = [node.name for node in made.body if isinstance(node, Function)]
                found.setdefault(room, []).extend(
                    f"{name}: {getattr(made, 'name', '')}.{verb}" for verb in verbs if verb in BARE_VERBS
                )
    assert {room: names for room, names in found.items() if len(names) > BARE.get(room, 0)} == {}
