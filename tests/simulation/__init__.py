"""Deterministic simulation of controllers over one store: one thread, a virtual clock, seeded faults.

    python -m tests.simulation [--ranks] SEED [SEED...]    repeats lives by their seeds

Everything is real but what takes time: index, pools, controllers, storage v2 and the memory store are the
product's own, and bytes are really copied. Background threads are greenlets that run one at a time and give
way only where a real thread would wait, in the order that the seed draws. So a seed names one history, and an
hour of virtual time takes milliseconds.
"""
