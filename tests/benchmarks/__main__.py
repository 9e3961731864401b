"""All benchmarks that need no model and no disk, one JSON line per row: `python -m tests.benchmarks`."""

import subprocess
import sys

for name in ("keys", "index", "engine_thread"):
    # A process each: what one leaves behind for the garbage collector is not to be the next one's cost.
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
