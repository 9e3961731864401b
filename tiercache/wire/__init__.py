"""The wire format between a daemon and its clients: encodings of the types of `tiercache.core`.

Principles:

1. Lengths and numbers are checked before anything is allocated for them.
2. A message that is malformed is a WireError, and changes nothing.
3. The types of `core` do not know the wire: this package alone converts them.

Order of reading:

1. `proto/tiercache/wire/v1` defines the messages.
2. `methods` has the table of calls.
3. `messages` converts between protobuf and `tiercache.core`.
4. `data` has the frames of data connections.
5. `attachment` sets up memory that two processes share.
"""
