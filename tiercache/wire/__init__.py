"""The wire format between a daemon and its clients: how the types of `tiercache.core` are encoded in messages, not what is done with them.

Read `proto/tiercache/wire/v1` first, then `methods` (the table of calls), `messages` (protobuf <-> core), `frames` (messages that carry
payload, with few copies) and `memory` (regions that two processes share).
"""
