"""Replay of traffic through the real index, policies and controller, without a model and without payload.

Reading order: `base` (requests and their sources), `sources` (traces and generators), `plane` and `store`
(pools, engine and store without memory), `drive` (one run), `clairvoyant` (a cache that knows the future),
`study` (many runs), `results`, `tables`, `report` (with `charts`); `verb` (`tiercache replay`).
"""
