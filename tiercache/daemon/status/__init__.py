"""The status document: what an operator wants to know of a daemon at one moment.

Read in this order: `document` (the fields), `samples` (figures of the last hour), `slowest` (calls that took
longest), `journal` (what has happened), `board` (which makes the document for a reader).
"""
