"""All benchmarks that need no model, one JSON line per row: `python -m tests.benchmarks`."""

from tests.benchmarks import engine_thread, index, keys, storage, transfer

for module in (keys, index, engine_thread, storage, transfer):
    module.main()
