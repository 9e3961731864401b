"""Conformance suites and fault injection for authors of stores and policies, shipped in the wheel; needs pytest and hypothesis.

Import the parts by name: `faults` (FaultEnv), `crash` (CrashEnv: what a power cut leaves), `objects` (test objects), `conformance`
(BackendConformance), `policies` (PolicyConformance), `policy_rig` (the columns and the index that it ranks), `stateful` (the state
machines), `faulty`, `latency` and `outage` (wrappers that misbehave), `cuda` (SimulatedDevice).
"""
