"""Conformance suites and faults, shipped in the wheel, for those who write a store: needs pytest and hypothesis.

Import the parts by name: `faults` (FaultEnv), `objects` (test objects), `conformance` (BackendConformance), `stateful` (the state machine).
"""
