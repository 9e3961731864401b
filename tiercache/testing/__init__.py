"""Conformance suites and faults, shipped in the wheel, for those who write a store: needs pytest and hypothesis.

Import the parts by name: `faults` (FaultEnv), `crash` (CrashEnv: what a power cut leaves), `objects` (test objects), `conformance`
(BackendConformance), `policies` (PolicyConformance), `policy_rig` (what it ranks), `stateful` (the state machines), `faulty`, `latency`
and `outage` (wrappers that misbehave), `cuda` (SimulatedDevice).
"""
