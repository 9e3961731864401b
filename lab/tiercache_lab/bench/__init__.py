"""The verb `tiercache bench`: measurements of tiercache on this machine.

Principles:

1. What is compared runs in turns, in one process, so that both meet the same machine.
2. Rows are data: each way of showing them shows the same ones.
3. Bytes that come back are compared, or the run ends.

Most results are compared with a raw limit: the speed at which this machine moves the same bytes without
tiercache. The limit is measured in the same run.

Reading order: `command` (the options), `plan` (their checked values), `disk` (the cases). The cases use
`subject` (the store that is measured), `baselines` (plain system calls), `timing`,
`machine` and `rows`. `rpc` and `device` are separate benchmarks.
"""
