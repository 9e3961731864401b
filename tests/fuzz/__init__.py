"""Decoders of bytes that come from outside, with bytes that nobody meant.

base       what a target is, and how one input is tried
received   targets whose bytes come from a socket or another process
stored     targets whose bytes come from a disk or a bucket
written    targets whose bytes a user wrote: settings, addresses, prompts, traces
table      all targets
mutation   inputs that are like sound ones, the same in each run: for `make test`
guided     inputs that reach new branches (atheris): for `make campaign ARGS="--only fuzz"`
"""
