"""Tools around the product: replay of traffic, benchmarks, the test of a running engine, and the demo.

No other package imports this one; the `tiercache` command finds its verbs by name.
"""
