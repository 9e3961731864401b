"""Check the built wheel with the interpreter of an environment that holds nothing else.

`core` (the default): the wheel was installed without extras. Importing loads nothing heavy, stores and a
controller work, and what needs an extra says so. `cli`: with the extra `cli`; the verbs look at a stopped
store. `all`: with the extra `all`, at whatever versions; a daemon serves an object. `lab`: with the wheel of
the lab beside it, which brings its verbs; until then, nothing of the lab is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

import tiercache
from tiercache import errors

HEAVY = ("torch", "grpc", "numpy", "lmdb")
CORE = {"numpy", "blake3", "xxhash", "msgpack", "lmdb"}
BROUGHT = {"typing-extensions", "pip", "setuptools", "tiercache-hybrid"}
"""Dependencies of the five in `CORE`, and distributions that every environment has."""
LAB = ("bench", "demo", "prove", "replay")
"""Verbs of the lab."""
RIVALS = {"lpc", "marconi", "seglen", "seglen:additive"}
"""Policies of the lab."""
MODULES = (
    "tiercache_backends.file", "tiercache_backends.lmdb", "tiercache_backends.local",
    "tiercache_backends.memory", "tiercache_kernels", "tiercache.controller", "tiercache.core",
    "tiercache.geometry", "tiercache.index", "tiercache.keys", "tiercache.models", "tiercache.policy",
    "tiercache.pools", "tiercache.storage", "tiercache.transfer",
)  # fmt: skip
"""The library that an engine embeds."""


def check_imports() -> None:
    """Import tiercache, which loads nothing, then every module of the library, which loads the five only."""
    for name in HEAVY:
        assert name not in sys.modules, f"import tiercache loads {name}"
    installed = {d.metadata["Name"].lower().replace("_", "-") for d in distributions()}
    assert installed - BROUGHT == CORE, installed
    for package in MODULES:
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
            if not info.name.endswith("__main__"):
                importlib.import_module(info.name)


def check_contents() -> None:
    """Check that what is no Python source is in the wheel as well."""
    for package in ("tiercache", "tiercache_backends", "tiercache_kernels"):
        assert (files(package) / "py.typed").is_file(), f"{package} has no py.typed in the wheel"
    sources = {f.name for f in (files("tiercache_kernels") / "csrc").iterdir()}
    assert {"copy_segments.cu", "copy_segments.cuh"} <= sources


def check_controller(url: str) -> None:
    """Commit a page through a controller, and get it back through a second one from the store."""
    import numpy as np

    from tiercache.controller import ControllerOptions, HybridCacheController
    from tiercache.core import PoolName, as_tokens
    from tiercache.geometry import kv_geometry
    from tiercache.keys import Identity
    from tiercache.pools import DevicePool, HostArena
    from tiercache.storage import open_backend

    class Tensor:
        """Array in the clothes of a torch tensor."""

        device = "cpu"
        dtype = "float32"

        def __init__(self, array: np.ndarray) -> None:
            self.array, self.shape = array, array.shape

        def data_ptr(self) -> int:
            return self.array.ctypes.data

        def element_size(self) -> int:
            return self.array.itemsize

        def stride(self) -> list[int]:
            return [step // self.array.itemsize for step in self.array.strides]

    geometry = kv_geometry([0], kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    tokens = as_tokens(range(5))  # one page, and a token that is always computed

    def life(fill: float, *, restores: bool) -> float:
        rows = {(s.layer, s.name): np.zeros((8 * 4, *s.shape[1:]), np.float32) for s in geometry.segments}
        pool = DevicePool.from_tensors(geometry, {place: Tensor(array) for place, array in rows.items()})
        identity = Identity("wheel", "1", "float32", "float32", "float32", 4)
        controller = HybridCacheController(
            identity,
            {PoolName.KV: pool},
            HostArena(16 * 4096, 4096),
            open_backend(url),
            options=ControllerOptions(restore_deadline=10.0),
        )
        admission = controller.admit(controller.lookup(tokens), tokens=8, states=0)
        depth = admission.wait().depth
        admission.wait_layer(0)
        assert depth == (4 if restores else 0), depth
        slot = int(admission.pages[PoolName.KV][0])
        for array in rows.values():
            if not restores:
                array[slot * 4 : slot * 4 + 4] = fill
        value = float(next(iter(rows.values()))[slot * 4, 0, 0])
        controller.commit(admission, tokens, {})
        controller.release(admission)
        assert controller.flush(20)
        restored = controller.metrics.value("tokens_total", "restored")
        assert restored == (4 if restores else 0), restored
        controller.close()
        return value

    assert life(7.0, restores=False) == life(0.0, restores=True) == 7.0, url


def check_missing_extras() -> None:
    """Check that what needs an extra names it in one sentence."""
    from tiercache.metrics import Metrics
    from tiercache.storage import open_backend

    def says(part: str, extra: str) -> None:
        raised = sys.exc_info()[1]
        assert part in str(raised), raised
        assert f"is not installed: pip install 'tiercache-hybrid[{extra}]'" in str(raised), raised

    for work, part, extra in (
        (lambda: open_backend("grpc://127.0.0.1:1"), "storage type 'grpc' needs protobuf", "grpc"),
        (lambda: importlib.import_module("tiercache.daemon"), "the daemon needs pydantic", "daemon"),
        (lambda: Metrics([]).registry, "a registry of metrics needs prometheus-client", "metrics"),
    ):
        try:
            work()
        except errors.ConfigError:
            says(part, extra)
        else:
            raise AssertionError(f"nothing is missing, although {part}")
    done = subprocess.run([command(), "--help"], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert (
        done.stderr == "tiercache: the command line needs typer, which is not installed:"
        " pip install 'tiercache-hybrid[cli]'\n"
    )


def check_daemon(directory: str) -> None:
    """Serve a store, store objects through a client of the daemon, and get them back."""
    from tiercache.core import Outcome
    from tiercache.storage import open_backend
    from tiercache.testing.objects import fetch, key, payload, to_set

    with serving(directory) as url, open_backend(url) as store:
        # Several objects in one call: the file store writes their records to its catalog by one call of LMDB.
        items = [to_set(key(n), payload(n, 5000)) for n in range(8)]
        assert store.set(items) == [Outcome.STORED] * len(items)
        assert [fetch(store, key(n), 5000) for n in range(8)] == [payload(n, 5000) for n in range(8)]


@contextmanager
def serving(directory: str) -> Iterator[str]:
    """Run `tiercache serve` until it serves; yield the URL for clients, then stop it and check its end."""
    node = subprocess.Popen(
        [
            command(), "serve", "-d", directory, "--disk-bytes", "64MiB", "--host-bytes", "64MiB", "-o",
            "jsonl",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert node.stdout is not None
        assert '"unix"' in node.stdout.readline()
        yield f"grpc://{directory}/run"
    finally:
        node.terminate()
        assert node.wait(60) == 0, node


def command() -> str:
    """Return the path of the console script beside this interpreter."""
    return str(Path(sys.executable).parent / "tiercache")


def check_core() -> None:
    """Check an environment without extras."""
    check_imports()
    check_contents()
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("file", "lmdb"):
            check_controller(f"{kind}://{directory}/{kind}?capacity=16MiB")
    check_missing_extras()
    loaded = {"torch", "cupy", "grpc", "google", "pydantic", "prometheus_client"} & {*sys.modules}
    assert not loaded, loaded


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end."""
    return subprocess.run([command(), *arguments], capture_output=True, text=True)


def rivals() -> set[str]:
    """Return the names of the lab's policies that are there."""
    from tiercache.policy import policy_named

    found = set()
    for name in RIVALS:
        with suppress(errors.ConfigError):
            found.add(policy_named(name).name)
    return found


def check_no_lab() -> None:
    """Check that the product's wheel has nothing of the lab, and that the lab's verbs say where they are."""
    assert importlib.util.find_spec("tiercache_lab") is None
    assert importlib.util.find_spec("tiercache.lab") is None
    assert not rivals()
    listed = run("--help").stdout.split("Commands:")[1]
    for verb in LAB:
        assert f"\n  {verb} " not in listed, verb
        for arguments in ((verb,), (verb, "--help")):
            done = run(*arguments)
            assert (done.returncode, done.stdout) == (2, ""), done
            assert done.stderr == (
                f"tiercache: tiercache {verb} is in the package tiercache-lab, which is not installed:"
                " pip install path/to/checkout/lab\n"
            ), done.stderr


def check_lab() -> None:
    """Check an environment with the lab's wheel: its verbs, a replay with its report, and a bench."""
    assert (files("tiercache_lab") / "py.typed").is_file()
    assert rivals() == RIVALS
    for verb in LAB:
        assert run(verb, "--help").returncode == 0, verb
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory, "replay.html")
        done = run(
            "replay", "agent", "--limit", "20", "--policy", "lru,hvd", "--report", str(page), "-o", "jsonl"
        )
        assert done.returncode == 0, done
        assert page.read_text().startswith("<!doctype html>")
        small = ("--size", "64KiB", "--bytes", "1MiB", "--case", "get-warm", "--repeat", "1", "-d", directory)
        done = run("bench", "disk", *small, "-o", "jsonl")
        assert done.returncode == 0, done
    assert run("replay", "agent", "--machine", "h100", "--limit", "5", "--policy", "lru").returncode == 0


def check_cli() -> None:
    """Check an environment with the extra `cli`: verbs on a stopped store, and what else they need."""
    from tiercache.storage import open_backend
    from tiercache.testing.objects import key, payload, put

    check_no_lab()
    for verb in ("serve", "status", "ls", "inspect", "verify", "flush", "doctor", "config"):
        assert run(verb, "--help").returncode == 0, verb
    with tempfile.TemporaryDirectory() as directory:
        with open_backend(f"lmdb://{directory}/store?capacity=16MiB") as store:
            put(store, key("a"), payload("a", 5000))
        for arguments in (("ls",), ("verify",), ("status",), ("inspect", key("a").page_key.hex())):
            done = run(*arguments, "-s", f"{directory}/store")
            assert done.returncode == 0, done
        done = run("serve", "-d", directory)
        assert done.returncode == 2, done
        assert done.stderr == (
            "tiercache: the daemon needs grpcio, which is not installed:"
            " pip install 'tiercache-hybrid[daemon]'\n"
        )


def check_all() -> None:
    """Check an environment with the extra `all`."""
    check_no_lab()
    done = run("--help")
    assert done.returncode == 0
    assert "Exit codes of all verbs" in done.stdout
    with tempfile.TemporaryDirectory() as directory:
        check_daemon(os.path.realpath(directory))


if __name__ == "__main__":
    checks = {"core": check_core, "cli": check_cli, "all": check_all, "lab": check_lab}
    checks[sys.argv[1] if sys.argv[1:] else "core"]()
    print(f"tiercache {tiercache.__version__} from {tiercache.__file__}")
