"""`tiercache replay --plan`: how much host memory and disk save how much on a source.

Reading order: `search` (the curve of savings by size, and which sizes are run), `answer` (what is shown).
"""
