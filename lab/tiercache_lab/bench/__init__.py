"""The verb `tiercache bench`: measurements of tiercache on this machine.

Most results are compared with a raw limit: the speed at which this machine moves the same bytes without
tiercache. The limit is measured in the same run.

Reading order: `command` (the options), `plan` (their checked values), `disk` and `lookups` (the cases). The
cases use `subject` (the store that is measured), `baselines` (plain system calls), `rivals` (other stores),
`timing`, `machine`, `rows`, `show`. `rpc` and `device/` are separate benchmarks.
"""
