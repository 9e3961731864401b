"""`tiercache bench`: what this machine gives, each figure beside a raw limit that was measured in the same run.

Read `command` (the options), `plan` (what they mean), `run`, `disk` and `lookups` (the cases); then what these are made of: `subject`
(the store that is measured), `raw` (its limits), `peer` (the layout it competes with), `timing`, `machine`, `rows`, `show`.
`rpc` and `device/` are benches of their own.
"""
