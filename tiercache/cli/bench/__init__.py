"""`tiercache bench`: measurements of this machine, each beside a raw limit that is measured in the same run.

Reading order: `command` (the options), `plan` (their meaning), `run`, `disk` and `lookups` (the cases); then the parts of these: `subject`
(the store that is measured), `raw` (its limits), `peer` (the layout it is compared with), `timing`, `machine`, `rows`, `show`.
`rpc` and `device/` are separate benchmarks.
"""
