"""Run with the interpreter of an environment that holds only the built wheel: is everything in it, and nothing heavy loaded?"""

import importlib
import pkgutil
import sys
import tempfile
from importlib.metadata import entry_points
from importlib.resources import files

import tiercache

assert "torch" not in sys.modules, "import tiercache loads torch"
assert "grpc" not in sys.modules, "import tiercache loads grpc"
for package in ("tiercache", "tiercache_backends", "tiercache_kernels"):
    assert (files(package) / "py.typed").is_file(), f"{package} has no py.typed in the wheel"

from tiercache.storage import open_backend  # noqa: E402

assert {"memory", "file"} <= {e.name for e in entry_points(group="tiercache.storage_backends")}
with tempfile.TemporaryDirectory() as directory, open_backend(f"file://{directory}/store?capacity=16MiB") as store:
    assert store.usage().objects == 0

for package in (
    "tiercache_backends",
    "tiercache_kernels",
    "tiercache.controller",
    "tiercache.index",
    "tiercache.pools",
    "tiercache.transfer",
):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
assert {"copy_segments.cu", "copy_segments.cuh"} <= {f.name for f in (files("tiercache_kernels") / "csrc").iterdir()}
assert "torch" not in sys.modules, "the core loads torch"
assert "cupy" not in sys.modules, "the core loads CuPy"
print(f"tiercache {tiercache.__version__} from {tiercache.__file__}")
