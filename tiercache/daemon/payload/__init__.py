"""Payload on its way in and out: through shared memory, on data connections, and in messages of gRPC.

Read in this order: `shared` and `attachments` (memory of clients on this host, GetInto and SetFrom),
`windows` (objects in leased blocks), `streams` (Get and Set of gRPC), `data` (calls of data connections) and
`port` (sessions, and the connections themselves). `wire.data` has the frames.
"""
