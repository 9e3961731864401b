"""Transfer of payloads through memory that the client and a daemon on the same host both map.

Words of this package:

    attached memory    memory of the engine, such as the worker's arena, that the daemon has mapped too
    staging memory     memory of this client that the daemon has mapped, for buffers outside attached memory
    place              where a payload lies: (number of the memory in this session, offset, size), or several
    session            a connection to the daemon's attach socket; at its end the daemon unmaps the memory

The steps of one read, on the client's side:

1. `plane` finds the item's buffers in attached memory (`extents.locate`), or takes a range of staging memory
   for the item (`extents.Staging`).
2. The call GetInto carries keys, lengths and places. The daemon reads the objects into these places, and
   answers with outcomes only.
3. A payload in staging memory is copied into the item's buffers, and its range is given back.
4. If no answer comes in time, the daemon may still write to the places later. Therefore the places are
   quarantined (not used for anything else), and the session (`session.Session`) is ended. When the daemon has
   closed its end of the session, nothing in the daemon refers to the memory any more.
   `session.AbandonedCalls` waits for this moment, and then ends the quarantine.

A write (SetFrom) works in the same way, in the other direction.
"""
