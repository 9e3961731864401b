"""Conformance suites for authors of stores and of integrations, shipped in the wheel.

Principles:

1. The suite tests the contract through the store's own methods, and spoils its medium through hooks.
2. A store declares what it can do; what it does not declare is not tested.
3. Random histories come from Hypothesis, which shortens one that fails and prints it.

The package needs pytest and hypothesis. Import its modules by name:

    conformance             the tests of the contract (BackendConformance)
    stateful                state machines that compare a store with a model
    objects                 keys, payloads and items for tests
    hosts                   the promises inside an engine, by its real servers (HostConformance)
"""
