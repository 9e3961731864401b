"""Tools around the product: replay of traffic, benchmarks, the test of a running engine, and the demo.

Its distribution is `tiercache-lab`. No other package imports it: the `tiercache` command finds its verbs
by entry points.
"""
