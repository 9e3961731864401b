"""Replay of traffic through the real index, policies and controller, without a model and without payload.

Principles:

1. What decides is the product's own code; only bytes, threads and the clock are replaced.
2. Two runs of the same arguments give the same rows.
3. Sizes are fractions of one cache for all policies, so that their columns can be compared.

Reading order: `base` (requests and their sources), `sources` (traces and generators), `plane` and `store`
(pools, engine and store without memory), `drive` (one run), `clairvoyant` (a cache that knows the future),
`study` (many runs), `results`, `tables`, `report` (with `charts`); `verb` (`tiercache replay`).
"""
