"""Payload on its way in and out: through shared memory, in messages, and on data connections.

Read in this order: `shared` and `attachments` (memory of clients on this host, GetInto and SetFrom),
`windows` (objects in leased blocks), `streams` (Get, Set), `channel` (bytes of a data connection),
`call_threads` (who serves its calls) and `port` (sessions, and the connections themselves).
`wire.data` has the frames.
"""
