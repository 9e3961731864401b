"""The wire between a daemon and its clients: what core's nouns look like in messages, and nothing about what is done with them.

Read `proto/tiercache/wire/v1` first, then `methods` (which calls there are), `messages` (protobuf <-> core), `frames` (messages that carry
payload, without copying it once more) and `memory` (regions that two processes share).
"""
