"""The status document: what an operator wants to know of a daemon at one moment.

Read in this order: `document` (the fields), `journal` (what has happened, and which calls took longest),
`board` (which samples the figures of the last hour, and makes the document for a reader).
"""
