"""Status of a daemon at one moment, as a document for operators.

Read in this order: `document` (the fields) and `board` (which samples the figures of the last hour, and makes
the document for a reader).
"""
