"""Order of the test files, by paths below `tests`: alone, in a process beside all others, and first."""

from __future__ import annotations

ALONE = ("daemon/test_floods.py", "daemon/test_hostile.py")
"""Tests that load the machine with floods."""

BESIDE = (
    "integrations/transformers", "models", "lab/demo", "test_house.py", "test_one_of_each.py",
)  # fmt: skip
"""Tests of one process, which imports Transformers, probes each small model and parses every file once."""

LONGEST = (
    "docs/test_pages.py", "storage/test_eviction_order.py", "lab/demo/test_demo.py",
    "simulation/test_simulation.py", "integrations/transformers/test_worker.py",
    "storage_backends/grpc/test_outage.py", "storage_backends/lmdb/test_lmdb.py",
    "integrations/transformers/test_cuda.py", "storage/test_faults.py", "lab/replay/test_verb.py",
    "storage_backends/grpc/test_conformance.py", "integrations/transformers/test_lengths.py",
    "integrations/transformers/test_identity.py", "storage_backends/grpc/test_abandoned.py",
    "storage_backends/file/test_file.py", "policy/test_conformance.py", "daemon/test_fuzz.py",
    "integrations/transformers/test_probe.py", "lab/bench/test_device.py", "lab/bench/test_bench.py",
    "lab/replay/test_drive.py", "cli/test_serve.py", "test_distribution.py", "test_examples.py",
    "hosts/test_sharing.py", "lab/demo/test_serving.py", "daemon/test_half_open.py",
    "storage/test_tiny_objects.py", "storage_backends/chain/test_conformance.py",
    "storage_backends/chain/test_machine.py", "lab/replay/test_study.py", "lab/replay/test_chain.py",
)  # fmt: skip
"""Files that begin first, so that no process is left with one; waiting ones stand between computing ones."""
